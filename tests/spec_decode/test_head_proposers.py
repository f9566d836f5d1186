"""mtp and frozen_kv_mtp against their definitions, through the lives that rows lead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.errors import ConfigError
from hyradix.request import Request, SamplingParams
from hyradix.spec_config import DraftShape
from hyradix.spec_decode.build import build_proposer
from hyradix.spec_decode.drafts import Drafts
from tests.spec_decode.naive import NaiveHead
from tests.spec_decode.test_beam import paths_of
from tests.spec_decode.world import WIDTH, World, make_model
from tests.support.demo import DemoEngines

CHAIN = DraftShape(topk=1, steps=4, nodes=5)
TREE = DraftShape(topk=3, steps=3, nodes=10)
WIDE = DraftShape(topk=4, steps=4, nodes=32)
SHAPES = [CHAIN, TREE, WIDE]


@pytest.fixture(scope="module", params=["compiled", "torch"])
def backend(request):
    return request.param


@pytest.fixture(scope="module", params=["mtp", "frozen_kv_mtp"])
def head(request, backend, tmp_path_factory):
    """(name, model, naive head)."""
    directory = tmp_path_factory.mktemp(request.param)
    return (request.param, *make_model(directory, request.param, backend))


class Naive:
    """The drafts that a row should get, by brute force over the whole row."""

    def __init__(self, head: NaiveHead, world: World, row: int) -> None:
        self.head, self.world, self.row = head, world, row
        self.outs: dict[tuple[int, ...], torch.Tensor] = {}

    def out(self, path: tuple[int, ...]) -> torch.Tensor:
        """The head's output for a node, by the tokens of its path, root first."""
        if path not in self.outs:
            world, row, n = self.world, self.row, int(self.world.done[self.row])
            target = world.hidden[row, :n].double()
            drafted = [self.out(path[:i]) for i in range(1, len(path))]
            if self.head.name == "mtp":
                tokens = [*world.token_ids[row, 1:n].tolist(), *path]
                hidden = torch.stack([*target, *drafted])
                self.outs[path] = self.head.mtp(tokens, hidden)
            else:
                slots = torch.from_numpy(world.kv_slots[row, :n]).long()
                layer = world.config.num_attention_layers - 1
                before = drafted[-1] if drafted else target[-1]
                k, v = world.k[layer, slots], world.v[layer, slots]
                self.outs[path] = self.head.frozen(path[-1], before, k, v)
        return self.outs[path]

    def tree(self, shape: DraftShape, max_nodes: int, max_depth: int) -> list[tuple[int, ...]]:
        n = int(self.world.done[self.row])
        made = last = [((int(self.world.token_ids[self.row, n]),), 0.0)]
        for _ in range(min(shape.steps, max_depth)):
            expanded = sorted(last, key=lambda node: -node[1])[: shape.topk]
            last = []
            for path, score in expanded:
                best = self.head.logprobs(self.out(path)).topk(shape.topk)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                last += [((*path, token), score + logprob) for token, logprob in pairs]
            made = made + last
        return [path for path, _ in sorted(made, key=lambda node: -node[1])[:max_nodes]]


def check(world: World, naive: NaiveHead, drafts: Drafts, rows, shape, nodes, depth) -> None:
    for tree, row in enumerate(rows):
        expected = Naive(naive, world, row).tree(shape, nodes[tree], depth[tree])
        assert paths_of(drafts, tree) == expected


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def begin(name, model, seed: int = 0) -> World:
    """Row 0 in chunks; row 1 at once; row 2 resumes at 10 from row 0, whose KV it shares to 15."""
    world = World(name, model, seed=seed)
    long = tokens(27, 1)
    world.enter(0, long)
    world.enter(1, tokens(12, 2))
    world.consume({0: 9, 1: 12}, sampled={1: 5})
    world.consume({0: 1, 1: 1}, sampled={1: 6})
    world.consume({0: 17, 1: 1}, sampled={0: 8, 1: 7})
    world.enter(2, long[:15] + tokens(9, 3), like=0, state=10, shared=15)
    world.consume({2: 3, 1: 1}, write_from={2: 15}, sampled={1: 9})
    world.consume({2: 11}, write_from={2: 15}, sampled={2: 11})
    return world


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_definition_over_rounds_of_partial_acceptance(head, shape):
    name, model, naive = head
    world = begin(name, model)
    limits = [(shape.nodes, shape.steps), (shape.nodes - 2, 2), (3, shape.steps), (1, 3), (4, 0)]
    for turn in range(6):
        rows = [0, 1, 2] if turn % 3 else [2, 0]
        nodes, depth = zip(*[limits[(turn + row) % 5] for row in rows], strict=True)
        drafts = world.propose(rows, shape, max_nodes=list(nodes), max_depth=list(depth))
        check(world, naive, drafts, rows, shape, nodes, depth)
        work = {row: world.accept(row, drafts, i, turn % 4) for i, row in enumerate(rows)}
        if 1 not in work:
            work[1] = 1
        world.consume(work, sampled={row: 20 + turn + row for row in work})


def test_hidden_states_are_those_of_the_definition(head, monkeypatch):
    name, model, naive = head
    world = begin(name, model)
    normalize = model.draft_head.normalize
    seen = []

    def watched(x):
        seen.append(model.ops.tensor(normalize(x)).clone())
        return model.ops.view(seen[-1])

    monkeypatch.setattr(model.draft_head, "normalize", watched)
    drafts = world.propose([0, 2], CHAIN)
    assert drafts.num_nodes.tolist() == [5, 5]
    assert len(seen) == CHAIN.steps - 1
    for tree, row in enumerate((0, 2)):
        path = paths_of(drafts, tree)[-1]
        expected = Naive(naive, world, row)
        for depth, out in enumerate(seen):
            wanted = expected.out(path[: depth + 1])
            assert torch.allclose(out[tree].double(), wanted, atol=1e-5)


def test_what_is_proposed_does_not_depend_on_the_other_rows(head):
    name, model, _ = head
    world, alone = begin(name, model), begin(name, model)
    together = world.propose([0, 1, 2], TREE)
    for tree, row in enumerate((0, 1, 2)):
        assert paths_of(together, tree) == paths_of(alone.propose([row], TREE), 0)


def test_a_row_that_begins_anew_forgets(head):
    name, model, naive = head
    world = begin(name, model)
    world.propose([0], CHAIN)
    world.enter(0, tokens(4, 9))
    world.consume({0: 3})
    assert world.propose([0], CHAIN).num_nodes.tolist() == [1 if name == "mtp" else 5]
    world.consume({0: 1}, sampled={0: 3})
    drafts = world.propose([0], CHAIN)
    check(world, naive, drafts, [0], CHAIN, [5], [4])


@pytest.mark.parametrize("shared", [10, 15])
def test_a_row_resumes_behind_the_hidden_state_it_is_given(head, shared):
    name, model, naive = head
    world = begin(name, model)
    world.enter(3, [*world.token_ids[0, :shared].tolist(), 7, 8], like=0, state=10, shared=shared)
    world.consume({3: shared - 8}, write_from={3: shared}, sampled={3: 2})
    check(world, naive, world.propose([3], TREE), [3], TREE, [10], [3])


def test_shared_slots_are_not_written_even_with_what_they_hold(head):
    name, model, _ = head
    world = begin(name, model)
    world.enter(3, [*world.token_ids[0, :15].tolist(), 7], like=0, state=10, shared=15)
    world.k[-1, torch.from_numpy(world.kv_slots[0, :15]).long()] += 0.5  # a write would show
    world.consume({3: 3}, write_from={3: 15})
    world.consume({3: 3}, write_from={3: 15}, sampled={3: 2})


def test_nothing_is_left_of_the_request_before(head):
    name, model, naive = head
    world = begin(name, model)
    slot = int(world.kv_slots[0, 27])
    world.enter(0, [*world.token_ids[0, :27].tolist(), 3], like=0, state=27, shared=27)
    world.hidden[0, 27] = world.draw_hidden(1)[0]
    world.free.append(slot)  # it gets the very same one
    world.consume({0: 1}, write_from={0: 27}, sampled={0: 2})
    assert world.kv_slots[0, 27] == slot
    check(world, naive, world.propose([0], TREE), [0], TREE, [10], [3])


def test_a_row_of_one_token(head):
    name, model, naive = head
    world = World(name, model)
    world.enter(2, [4, 5])
    world.consume({2: 1})
    world.enter(3, [4])
    world.consume({2: 1, 3: 1}, sampled={3: 17})
    check(world, naive, world.propose([3], TREE), [3], TREE, [10], [3])


def test_without_a_slot_for_its_newest_token_mtp_waits_a_round(head):
    name, model, naive = head
    world = begin(name, model)
    world.consume({0: 1}, sampled={0: 30}, no_slot=(0,))
    first = world.propose([0], CHAIN)
    assert first.num_nodes.tolist() == [1 if name == "mtp" else 5]
    world.consume({0: 1}, sampled={0: 31})
    check(world, naive, world.propose([0], CHAIN), [0], CHAIN, [5], [4])


def test_a_full_row_has_no_next_token(head):
    name, model, _ = head
    world = World(name, model)
    world.enter(0, tokens(WIDTH, 4))
    world.own(0, WIDTH)
    world.token_ids = np.pad(world.token_ids, ((0, 0), (0, 1)))  # the proposer's stays as it is
    world.kv_slots = np.pad(world.kv_slots, ((0, 0), (0, 1)))
    world.hidden = torch.nn.functional.pad(world.hidden, (0, 0, 0, 1))
    world.consume({0: WIDTH}, sampled={0: 1})


def test_a_newest_token_that_was_given_another_slot(head):
    name, model, naive = head
    world = begin(name, model)
    world.kv_slots[0, 27] = world.free.pop()
    if name == "mtp":
        assert world.propose([0], CHAIN).num_nodes.tolist() == [1]
    world.consume({0: 1}, sampled={0: 31})
    check(world, naive, world.propose([0], CHAIN), [0], CHAIN, [5], [4])


def test_a_row_that_is_not_finite_gets_no_drafts_and_harms_nobody(head):
    name, model, naive = head
    world = begin(name, model)
    world.hidden[0, 27] = torch.nan
    world.consume({0: 1, 1: 1}, sampled={0: 1, 1: 2})
    drafts = world.propose([0, 1], TREE)
    assert drafts.num_nodes.tolist() == [1, 10]
    check(world, naive, Drafts(drafts.cu_nodes[1:] - 1, drafts.token_ids[1:], drafts.parents[1:]),
          [1], TREE, [10], [3])  # fmt: skip


def test_warm_up_touches_nothing(head):
    name, model, _ = head
    world = World(name, model)
    world.proposer.warm_up()
    assert world.k.isnan().all()
    assert world.v.isnan().all()


def test_frozen_kv_is_read_only(backend, tmp_path):
    model, _ = make_model(tmp_path, "frozen_kv_mtp", backend)
    proposer = World("frozen_kv_mtp", model).proposer
    for view in (proposer._k, proposer._v):
        with pytest.raises(ValueError, match="read-only"):
            view[3] = 0.0
        with pytest.raises(ValueError, match="read-only"):
            view += 1.0


def test_a_head_that_was_not_loaded(backend, tmp_path):
    model, _ = make_model(tmp_path, "mtp", backend)
    table = np.zeros((1, 8), np.int32)
    with pytest.raises(ConfigError, match="without the draft head frozen_kv_mtp"):
        build_proposer("frozen_kv_mtp", model, table, table, None)
    assert build_proposer("ngram", model, table, table, None).name == "ngram"


@pytest.mark.parametrize("proposer", ["mtp", "frozen_kv_mtp"])
def test_the_torch_backend_serves_with_heads(proposer):
    """As the compiled kernels do: views of lent memory are taken inside of inference mode."""
    prompt = np.arange(10, 30, dtype="<i4").tobytes()
    found = []
    for options in ({}, {"spec": proposer, "spec_topk": 2, "spec_steps": 3, "spec_nodes": 8}):
        engine = DemoEngines(backend="torch").make(num_threads=1, **options)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling, seed=0))
        tokens: list[int] = []
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                tokens += output.token_ids
        found.append(tokens)
    assert found[0] == found[1]
    assert len(found[0]) == 8

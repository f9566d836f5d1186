"""A mixture of experts on the device: routing, pairs by expert, products, against float64."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.activation.reference import activate
from hyradix.kernels.moe import reference
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.moe.triton import DeviceExperts, ExpertScratch, experts, max_blocks
from hyradix.kernels.moe.triton_routing import DeviceRouting, group_pairs, route
from hyradix.kernels.triton_table import ExpertConfig, ProductConfig, expert_config
from tests.kernels.triton_kernels.cases import NAN, error

ROUTINGS = {
    "softmax": Routing(num_experts=8, top_k=3),
    "plain": Routing(num_experts=8, top_k=8, is_normalised=False, scale=1.5),
    "shared": Routing(num_experts=7, top_k=2, has_shared_gate=True),
    "sigmoid": Routing(num_experts=72, top_k=3, scoring="sigmoid", scale=2.5),
    "bias": Routing(num_experts=8, top_k=3, scoring="sigmoid", bias=torch.linspace(-1, 1, 8)),
    "one group": Routing(num_experts=12, top_k=4, num_groups=3, top_groups=1),
    "groups": Routing(
        num_experts=15, top_k=4, scoring="sigmoid", num_groups=5, top_groups=2, scale=0.5,
        bias=torch.linspace(1, -1, 15), has_shared_gate=True,
    ),
}  # fmt: skip
SMALL = ExpertConfig(16, ProductConfig(16, 16, 4, 2), ProductConfig(16, 16, 4, 2))
LIMIT = 1e-5


def logits_of(routing, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = routing.num_experts + routing.has_shared_gate
    return torch.randn(tokens, width, generator=generator) * 2


def routed(logits, routing, device):
    """By the kernel, from rows of a wider, poisoned array."""
    rows = torch.full((len(logits), logits.shape[1] + 3), NAN)
    rows[:, : logits.shape[1]] = logits
    given = rows.to(device)[:, : logits.shape[1]]
    found = route(given, DeviceRouting.of(routing, device))
    shared = None if found.shared is None else found.shared.cpu()
    return Routes(found.ids.cpu(), found.weights.cpu(), shared)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_equals_the_twin(device, name):
    routing = ROUTINGS[name]
    logits = logits_of(routing, 9)
    found, expected = routed(logits, routing, device), reference.route(logits.double(), routing)
    assert torch.equal(found.ids.long(), expected.ids)
    assert error(found.weights, expected.weights) < LIMIT
    assert (found.shared is None) == (expected.shared is None)
    if found.shared is not None:
        assert error(found.shared, expected.shared) < LIMIT


def test_of_equal_scores_the_lower_number_is_chosen(device):
    logits = torch.zeros(2, 10)
    logits[1, 4] = logits[1, 9] = 1.0
    found = routed(logits, Routing(num_experts=10, top_k=3), device)
    assert found.ids.tolist() == [[0, 1, 2], [4, 9, 0]]
    groups = Routing(num_experts=10, top_k=3, num_groups=5, top_groups=2, scoring="sigmoid")
    assert routed(logits, groups, device).ids.tolist() == [[0, 1, 2], [4, 9, 5]]


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_faulty_row_gets_valid_experts_and_harms_no_other(device, name):
    routing = ROUTINGS[name]
    logits = logits_of(routing, 4)
    sound = routed(logits, routing, device)
    logits[1] = NAN
    logits[3, :2] = torch.tensor([NAN, -torch.inf])
    found = routed(logits, routing, device)
    for row in (0, 2):
        assert torch.equal(found.ids[row], sound.ids[row])
        assert torch.equal(found.weights[row], sound.weights[row])
    for row in (1, 3):
        ids = sorted(found.ids[row].tolist())
        assert len(set(ids)) == routing.top_k
        assert ids[0] >= 0
        assert ids[-1] < routing.num_experts


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 3, 5), (37, 2, 6), (700, 2, 40)])
def test_pairs_stand_by_expert_in_their_order(device, tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    ids[ids == 1] = num_experts - 1  # nobody chooses expert 1
    pairs, block_m = tokens * top_k, 4
    size = max_blocks(pairs, num_experts, block_m)
    order, places, offsets, blocks = (
        torch.full(shape, -9, dtype=torch.int32, device=device)
        for shape in ((pairs,), (pairs,), (num_experts + 1,), (size, 2))
    )
    group_pairs(ids.to(device), block_m, order, places, offsets, blocks)
    flat = ids.flatten().long()
    expected = flat.argsort(stable=True)
    assert torch.equal(order.cpu().long(), expected)
    assert torch.equal(expected[places.cpu().long()], torch.arange(pairs))
    counts = flat.bincount(minlength=num_experts)
    assert torch.equal(offsets.cpu()[1:], counts.cumsum(0).int())
    assert offsets[0] == 0
    begin = offsets.tolist()
    by_hand = [[e, at] for e in range(num_experts) for at in range(begin[e], begin[e + 1], block_m)]
    by_hand += [[-1, 0]] * (size - len(by_hand))
    assert blocks.tolist() == by_hand


def experts_of(activation, *, count=6, width=41, hidden=23):
    generator = torch.Generator().manual_seed(3)
    rows = 2 * hidden if activation == "swiglu" else hidden

    def normal(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    return ExpertWeights(normal(count, rows, width), normal(count, width, hidden), activation)


def token_by_token(x, routes, raw, residual):
    """In float64; what an expert adds goes in one by one."""
    out = torch.zeros(x.shape, dtype=torch.float64) if residual is None else residual.double()
    for t, chosen in enumerate(routes.ids.tolist()):
        for j, e in enumerate(chosen):
            hidden = activate(raw.up[e].double() @ x[t].double(), raw.activation)
            out[t] += routes.weights[t, j].double() * (raw.down[e].double() @ hidden)
    return out


def random_routes(tokens, chosen, *, top_k=2, seed=0):
    """Among the experts ``chosen``."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(tokens, len(chosen), generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=generator)
    return Routes(torch.tensor(chosen)[picks].int(), weights, None)


def ours(x, routes, raw, residual, device, *, max_tokens=64, config=SMALL):
    """In poisoned scratch and outputs."""
    weights = DeviceExperts.of(raw, device, torch.float32)
    scratch = ExpertScratch(
        max_tokens, routes.ids.shape[1], weights.num_experts, weights.hidden, weights.width,
        device, torch.float32,
    )  # fmt: skip
    for buffer in scratch.buffers:
        buffer.fill_(NAN if buffer.dtype == torch.float32 else 1 << 30)
    out = torch.full((len(x), x.shape[1] + 3), NAN, device=device)[:, 3:]
    given = Routes(routes.ids.to(device), routes.weights.to(device), None)
    added = None if residual is None else residual.to(device)
    found = experts(x.to(device), given, weights, added, scratch, out=out, config=config)
    assert found is out
    return out.cpu()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("tokens", [1, 4, 7, 40])
@pytest.mark.parametrize("is_added", [True, False])
def test_experts_equal_a_loop_over_tokens(device, activation, tokens, is_added):
    """Nobody chooses experts 1 and 4; up to 4 tokens nothing is sorted, of 40 one expert has more
    than a block."""
    raw, routes = experts_of(activation), random_routes(tokens, [0, 2, 3, 5])
    generator = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, 41, generator=generator)
    added = residual if is_added else None
    expected = token_by_token(x, routes, raw, added)
    assert error(ours(x, routes, raw, added, device), expected) < LIMIT


@pytest.mark.parametrize("config", [None, SMALL])
def test_all_tokens_may_choose_one_expert(device, config):
    raw, x = experts_of("swiglu", width=64, hidden=32), torch.randn(35, 64)
    routes = Routes(torch.full((35, 1), 5, dtype=torch.int32), torch.rand(35, 1), None)
    found = ours(x, routes, raw, None, device, config=config)
    assert error(found, token_by_token(x, routes, raw, None)) < LIMIT


def test_more_tokens_than_scratch_go_in_turns(device):
    raw, routes, x = experts_of("relu2"), random_routes(11, [0, 1, 2]), torch.randn(11, 41)
    whole = ours(x, routes, raw, x, device)
    assert torch.equal(ours(x, routes, raw, x, device, max_tokens=4), whole)
    assert error(whole, token_by_token(x, routes, raw, x)) < LIMIT


def test_rows_know_nothing_of_each_other(device):
    raw, routes, x = experts_of("swiglu"), random_routes(9, [0, 1, 2, 3]), torch.randn(9, 41)
    whole = ours(x, routes, raw, None, device)
    part = Routes(routes.ids[3:5], routes.weights[3:5], None)
    assert torch.equal(ours(x[3:5], part, raw, None, device), whole[3:5])
    x[[0, 8]] = NAN  # rows that pad a batch
    faulty = ours(x, routes, raw, None, device)
    assert torch.equal(faulty[1:8], whole[1:8])
    assert faulty[[0, 8]].isnan().all()


def test_blocks_are_enough_for_the_worst_case():
    for pairs in (1, 5, 6, 7, 40):
        worst = 0
        for spread in range(1, 7):
            counts = [1] * min(spread, pairs)
            counts[0] += pairs - len(counts)
            worst = max(worst, sum(-(-n // 16) for n in counts))
        assert worst <= max_blocks(pairs, 6, 16)


def test_the_table_grows_with_the_pairs_of_an_expert():
    device = torch.device("cpu")
    sizes = [
        expert_config(device, pairs=8 * tokens, num_experts=256, itemsize=2).block_m
        for tokens in (1, 8, 64, 256, 1024, 4096)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] == 16
    assert sizes[-1] == 128

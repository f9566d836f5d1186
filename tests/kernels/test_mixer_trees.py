"""The mixers over draft trees: plain decode on every path, both backends, the three modes.

In torch bit by bit where node states are kept; of the compiled forms, the gated delta net's too
(the other families verify in torch there).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.state_bytes import MODES
from tests.kernels.mixer_cases import BACKENDS, GdnMixer, backends, cases, cut, families
from tests.kernels.tree_recurrence.cases import NAN, same, tree_of

modes = pytest.mark.parametrize("mode", MODES)
CHAIN = [-1, 0, 1, 2]
W6 = [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]
LOG = 5


def random_tree(num_nodes):
    return tree_of("random", num_nodes, torch.Generator().manual_seed(num_nodes))


def spec_layer(mode, mixer, num_nodes, *, sliding=False, num_requests=4):
    """Buffers of NaN."""
    ops, width = mixer.ops, mixer.width
    rows = LOG + num_nodes if mode == "log" else num_nodes
    columns = num_nodes + width - 2 if sliding else width - 1 + rows

    def empty(*shape):
        return ops.view(torch.full((num_requests + 1, *shape), NAN))

    k, v = empty(rows, mixer.hk, mixer.dk), empty(rows, mixer.hv, mixer.dv)
    g = empty(rows, mixer.hv, mixer.dk if mixer.rule.has_channel_decay else 1)
    beta = empty(rows, mixer.hv)
    states = empty(num_nodes, mixer.hv, mixer.dk, mixer.dv)
    own = {
        "snapshot": {"states": states},
        "replay": {"states": states, "k": k, "v": v, "g": g, "beta": beta},
        "log": {"k": k, "u": v, "g": g},
    }
    return SpecLayer(
        mode=mode,
        conv=empty(columns, mixer.channels),
        first_node=width - 2 if sliding else columns - num_nodes,
        num_base_columns=width - 2 if sliding else 0,
        num_log_rows=LOG if mode == "log" else 0,
        **own[mode],
    )


def rows_of(spec):
    """What nodes leave behind, beside states and columns."""
    return [x for x in (spec.k, spec.v, spec.u, spec.g, spec.beta) if x is not None]


def arrays_of(spec, ops):
    arrays = (spec.states, *rows_of(spec), spec.conv)
    return [ops.tensor(x) for x in arrays if x is not None]


def arrange(spec, mixer, trees, slots, rows, first_token):
    cu = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    flat = FlatTrees.of(cu, np.concatenate([*trees, []]).astype(np.int32))
    none = np.zeros(len(trees), np.int32)
    if spec.num_base_columns or spec.first_node == mixer.width - 2:
        taps = flat.depths[:, None] + np.arange(-1, mixer.width - 1, dtype=np.int32)
        taps = taps.astype(np.int32)
    else:
        taps = taps_of(
            flat, none, width=mixer.width, first_node=spec.first_node, first_row=mixer.width - 1
        )
    first_token, slots, rows = (np.array(x, np.int32) for x in (first_token, slots, rows))
    return RaggedTrees(flat, first_token, slots, rows, none, taps)


def mix_trees(mixer, x, trees, spec, slots, rows, *, before=0):
    """Outputs of all nodes; ``x`` has ``before`` tokens of others in front, trees follow."""
    sizes = [len(tree) for tree in trees]
    first = (before + np.cumsum([0, *sizes[:-1]])).tolist()
    ragged = arrange(spec, mixer, trees, slots, rows, first)
    out = mixer.run_trees(x, ragged, spec)
    assert out[:before].isnan().all()
    return out[before:], ragged


def started(family, shape, ops, slots=(5, 2, 9)):
    """A mixer whose slots have consumed 6 tokens each."""
    mixer = family(shape, ops)
    for i, slot in enumerate(slots):
        mixer.clear(slot)
        mixer.run(mixer.inputs(6, seed=20 + i), [6], [slot])
    return mixer


def along(start, x, path, slot):
    """Output, state and window after plain decode of the tokens of a path, one a step, in slot 0.

    The slots of ``start`` keep their content.
    """
    start.state[0], start.conv[0] = start.state[slot], start.conv[slot]
    for node in path:
        o = start.run(cut(x, slice(node, node + 1)), [1], [0])
    return o[0], start.state[0], start.conv[0]


@backends
@cases
@modes
@pytest.mark.parametrize(
    "tree", [[-1], CHAIN, W6, random_tree(13)], ids=["root", "chain", "w6", "random"]
)
def test_every_node_is_plain_decode_on_its_path(ops, family, shape, mode, tree):
    mixer, trees, before = started(family, shape, ops), [CHAIN, tree], 3
    x = mixer.inputs(before + 4 + len(tree), seed=7)
    sliding = mode == "snapshot" and tree is CHAIN
    spec = spec_layer(mode, mixer, max(map(len, trees)) + 1, sliding=sliding)
    o, ragged = mix_trees(mixer, x, trees, spec, [5, 2], [1, 3], before=before)
    is_exact = mode != "log" and (ops.name == "torch" or family is GdnMixer)
    for i, (parents, slot, row) in enumerate(zip(trees, [5, 2], [1, 3], strict=True)):
        first = int(ragged.trees.cu_nodes[i])
        tokens = cut(x, slice(before + first, None))
        for node in range(len(parents)):
            path = ragged.trees.path(i, node)
            expected, state, window = along(mixer, tokens, path, slot)
            compare(o[first + node], expected, 0.0 if is_exact else 1e-4)
            if mode != "log":
                compare(ops.tensor(spec.states)[row, node], state, 0.0 if is_exact else 2e-5)
            columns = [
                mixer.conv[slot, -1 - tap] if tap < 0 else ops.tensor(spec.conv)[row, tap]
                for tap in ragged.taps[first + node, 1:].tolist()
            ]
            assert torch.equal(torch.stack(columns), window)
        for buffer in rows_of(spec):
            rows = ops.tensor(buffer)[row, spec.num_log_rows :]
            assert rows[: len(parents)].isfinite().all()
            assert rows[len(parents) :].isnan().all()


def compare(ours, expected, atol):
    assert torch.allclose(ours, expected, atol=atol, rtol=0.0)
    if atol == 0.0:
        assert torch.equal(ours, expected)


@backends
@cases
@modes
def test_the_pools_are_only_read_and_other_buffer_rows_keep_their_content(ops, family, shape, mode):
    mixer = started(family, shape, ops)
    before = mixer.state.clone(), mixer.conv.clone()
    trees = [W6, [], random_tree(20), CHAIN]
    spec = spec_layer(mode, mixer, 20)
    x = mixer.inputs(3 + 34)
    o, _ = mix_trees(mixer, x, trees, spec, [5, 2, 2, 9], [1, 2, 4, 3], before=3)
    assert o.isfinite().all()
    assert same(mixer.state, before[0])
    assert same(mixer.conv, before[1])
    for array in arrays_of(spec, ops):
        assert array[[0, 2]].isnan().all()


@cases
@pytest.mark.parametrize(
    ("mode", "sliding"), [("snapshot", True), *((mode, False) for mode in MODES)]
)
def test_compiled_equals_torch(family, shape, mode, sliding):
    results = []
    for ops in BACKENDS:
        mixer = started(family, shape, ops)
        trees = [CHAIN, CHAIN[:2], CHAIN[:1]] if sliding else [W6, random_tree(30), CHAIN]
        spec = spec_layer(mode, mixer, 30, sliding=sliding)
        x = mixer.inputs(sum(map(len, trees)))
        o, _ = mix_trees(mixer, x, trees, spec, [5, 9, 2], [1, 2, 3])
        results.append([o, *arrays_of(spec, ops)])
    for ours, twin in zip(*results, strict=True):
        scale = float(twin.nan_to_num().abs().max())
        assert torch.allclose(ours, twin, atol=2e-5 * max(scale, 1.0), equal_nan=True)


@backends
@cases
@pytest.mark.parametrize("tree", [CHAIN, W6, random_tree(63)], ids=["chain", "w6", "63"])
def test_the_log_form_is_decode_within_rounding(ops, family, shape, tree):
    mixer = started(family, shape, ops)
    x = mixer.inputs(len(tree), seed=7)
    o, _ = mix_trees(mixer, x, [tree], spec_layer("log", mixer, len(tree)), [9], [2])
    walked, _ = mix_trees(mixer, x, [tree], spec_layer("snapshot", mixer, len(tree)), [9], [1])
    assert torch.allclose(o, walked, atol=5e-5)


@backends
@families
@modes
def test_w6_perturbing_node_3_changes_nobody(ops, family, mode):
    results = []
    for factor in (1.0, 0.5):
        mixer = started(family, family.SHAPES[0], ops)
        x = mixer.inputs(10)
        for part in x:
            part[3] *= factor
        results.append(mix_trees(mixer, x, [W6], spec_layer(mode, mixer, 10), [2], [1])[0])
    others = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert torch.equal(results[0][others], results[1][others])
    assert not torch.equal(results[0][3], results[1][3])


@families
@modes
def test_neighbours_and_threads_change_no_bit(family, mode):
    ops = CompiledOps()
    alone, among = (started(family, family.SHAPES[3], ops) for _ in range(2))
    x = alone.inputs(4 * 12)
    one, _ = mix_trees(alone, cut(x, slice(16, 20)), [CHAIN], spec_layer(mode, alone, 4), [2], [1])
    spec = spec_layer(mode, among, 4, num_requests=12)
    many, _ = mix_trees(among, x, [CHAIN] * 12, spec, [2] * 12, list(range(1, 13)))
    assert torch.equal(one, many[16:20])


@backends
@families
def test_mix_leaves_the_rows_of_trees_alone(ops, family):
    mixer, other = (started(family, family.SHAPES[0], ops) for _ in range(2))
    x = mixer.inputs(9)
    out = mixer.run(x, [2, 3], [5, 2])
    expected = other.run(cut(x, slice(5)), [2, 3], [5, 2])
    assert torch.equal(out[:5], expected)
    assert same(mixer.state, other.state)

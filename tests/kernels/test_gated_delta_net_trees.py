"""The mixer over draft trees: bits of plain decode, both backends, the three modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.state_bytes import MODES
from tests.kernels.test_gated_delta_net import SHAPES, Mixer
from tests.kernels.tree_recurrence.cases import NAN, tree_of

BACKENDS = [CompiledOps(), TorchOps()]
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
modes = pytest.mark.parametrize("mode", MODES)
shapes = pytest.mark.parametrize("shape", SHAPES)
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
    g, beta = empty(rows, mixer.hv, 1), empty(rows, mixer.hv)
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
    arrays = (np.array(x, np.int32) for x in (first_token, slots, rows))
    first_token, slots, rows = arrays
    return RaggedTrees(flat, first_token, slots, rows, none, taps)


def mix_trees(mixer, x, trees, spec, slots, rows, *, before=0):
    """Outputs of all nodes; ``x`` has ``before`` tokens of others in front, trees follow."""
    sizes = [len(tree) for tree in trees]
    first = (before + np.cumsum([0, *sizes[:-1]])).tolist()
    view = mixer.ops.view
    out = torch.full((len(x), mixer.hv * mixer.dv), NAN)
    ragged = arrange(spec, mixer, trees, slots, rows, first)
    mixer.ops.mix_trees(
        view(x), mixer.weights, ragged, view(mixer.conv), view(mixer.state), spec, view(out)
    )
    assert out[:before].isnan().all()
    return out[before:], ragged


def started(shape, ops, slots=(5, 2, 9)):
    """A mixer whose slots have consumed 6 tokens each."""
    mixer = Mixer(shape, ops)
    for i, slot in enumerate(slots):
        mixer.clear(slot)
        mixer.run(mixer.inputs(6, seed=20 + i), [6], [slot])
    return mixer


def along(shape, ops, x, path, slot):
    """Output, state and window after plain decode of the tokens of a path, one a step."""
    mixer = started(shape, ops)
    for node in path:
        o = mixer.run(x[node : node + 1], [1], [slot])
    return o[0], mixer.state[slot], mixer.conv[slot]


@backends
@shapes
@pytest.mark.parametrize("mode", ["snapshot", "replay"])
@pytest.mark.parametrize("tree", [CHAIN, W6, random_tree(13)], ids=["chain", "w6", "random"])
def test_outputs_and_states_are_the_bits_of_plain_decode(ops, shape, mode, tree):
    mixer = started(shape, ops)
    x = mixer.inputs(len(tree), seed=7)
    sliding = mode == "snapshot" and tree is CHAIN
    spec = spec_layer(mode, mixer, len(tree) + 1, sliding=sliding)
    o, ragged = mix_trees(mixer, x, [tree], spec, [2], [3])
    states = ops.tensor(spec.states)[3]
    for node in range(len(tree)):
        expected, state, window = along(shape, ops, x, ragged.trees.path(0, node), 2)
        assert torch.equal(o[node], expected)
        assert torch.equal(states[node], state)
        columns = [
            mixer.conv[2, -1 - tap] if tap < 0 else ops.tensor(spec.conv)[3, tap]
            for tap in ragged.taps[node, 1:].tolist()
        ]
        assert torch.equal(torch.stack(columns), window)


@backends
@shapes
@modes
def test_the_pools_are_only_read_and_other_buffer_rows_keep_their_content(ops, shape, mode):
    mixer = started(shape, ops)
    before = mixer.state.clone(), mixer.conv.clone()
    trees = [W6, [], random_tree(20), CHAIN]
    spec = spec_layer(mode, mixer, 20)
    x = mixer.inputs(3 + 34)
    o, _ = mix_trees(mixer, x, trees, spec, [5, 2, 2, 9], [1, 2, 4, 3], before=3)
    assert o.isfinite().all()
    assert torch.equal(mixer.state.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(mixer.conv.nan_to_num(7), before[1].nan_to_num(7))
    buffers = (spec.states, spec.k, spec.v, spec.u, spec.g, spec.beta, spec.conv)
    for buffer in buffers:
        if buffer is not None:
            assert ops.tensor(buffer)[[0, 2]].isnan().all()


@shapes
@pytest.mark.parametrize(
    ("mode", "sliding"), [("snapshot", True), *((mode, False) for mode in MODES)]
)
def test_compiled_equals_torch(shape, mode, sliding):
    results = []
    for ops in BACKENDS:
        mixer = started(shape, ops)
        trees = [CHAIN, CHAIN[:2], CHAIN[:1]] if sliding else [W6, random_tree(30), CHAIN]
        spec = spec_layer(mode, mixer, 30, sliding=sliding)
        x = mixer.inputs(sum(map(len, trees)))
        o, _ = mix_trees(mixer, x, trees, spec, [5, 9, 2], [1, 2, 3])
        arrays = (spec.states, spec.k, spec.v, spec.u, spec.g, spec.beta, spec.conv)
        results.append([o, *(ops.tensor(a) for a in arrays if a is not None)])
    for ours, twin in zip(*results, strict=True):
        scale = float(twin.nan_to_num().abs().max())
        assert torch.allclose(ours, twin, atol=2e-5 * max(scale, 1.0), equal_nan=True)


@backends
@shapes
@pytest.mark.parametrize("tree", [CHAIN, W6, random_tree(63)], ids=["chain", "w6", "63"])
def test_the_log_form_is_decode_within_rounding(ops, shape, tree):
    mixer = started(shape, ops)
    x = mixer.inputs(len(tree), seed=7)
    o, _ = mix_trees(mixer, x, [tree], spec_layer("log", mixer, len(tree)), [9], [2])
    walked, _ = mix_trees(mixer, x, [tree], spec_layer("snapshot", mixer, len(tree)), [9], [1])
    assert torch.allclose(o, walked, atol=5e-5)


@backends
@modes
def test_w6_perturbing_node_3_changes_nobody(ops, mode):
    results = []
    for factor in (1.0, 0.5):
        mixer = started(SHAPES[0], ops)
        x = mixer.inputs(10)
        x[3] *= factor
        results.append(mix_trees(mixer, x, [W6], spec_layer(mode, mixer, 10), [2], [1])[0])
    others = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert torch.equal(results[0][others], results[1][others])
    assert not torch.equal(results[0][3], results[1][3])


@modes
def test_neighbours_and_threads_change_no_bit(mode):
    ops = CompiledOps()
    alone, among = (started(SHAPES[3], ops) for _ in range(2))
    x = alone.inputs(4 * 12)
    one, _ = mix_trees(alone, x[16:20], [CHAIN], spec_layer(mode, alone, 4), [2], [1])
    spec = spec_layer(mode, among, 4, num_requests=12)
    many, _ = mix_trees(among, x, [CHAIN] * 12, spec, [2] * 12, list(range(1, 13)))
    assert torch.equal(one, many[16:20])


@backends
def test_mix_leaves_the_rows_of_trees_alone(ops):
    mixer = started(SHAPES[0], ops)
    other = started(SHAPES[0], ops)
    x = mixer.inputs(9)
    out = mixer.run(x, [2, 3], [5, 2])
    expected = other.run(x[:5], [2, 3], [5, 2])
    assert torch.equal(out[:5], expected)
    assert torch.equal(mixer.state.nan_to_num(7), other.state.nan_to_num(7))

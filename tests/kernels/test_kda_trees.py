"""Kimi delta attention over draft trees: plain decode on every path, in the three modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.state_bytes import MODES
from tests.kernels.test_kda import SHAPES, Mixer, cut
from tests.kernels.tree_recurrence.cases import NAN, tree_of

BACKENDS = [CompiledOps(), TorchOps()]
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
modes = pytest.mark.parametrize("mode", MODES)
shapes = pytest.mark.parametrize("shape", SHAPES[:2])
CHAIN = [-1, 0, 1, 2]
RANDOM = tree_of("random", 13, torch.Generator().manual_seed(13))


def spec_layer(mode, mixer, num_nodes):
    """Buffers of NaN for three requests."""
    ops, heads = mixer.ops, mixer.heads

    def empty(*shape):
        return ops.view(torch.full((4, num_nodes, *shape), NAN))

    k, v, g = empty(heads, mixer.dk), empty(heads, mixer.dv), empty(heads, mixer.dk)
    states = empty(heads, mixer.dk, mixer.dv)
    own = {
        "snapshot": {"states": states},
        "replay": {"states": states, "k": k, "v": v, "g": g, "beta": empty(heads)},
        "log": {"k": k, "u": v, "g": g},
    }
    columns = mixer.width - 1 + num_nodes
    conv = ops.view(torch.full((4, columns, mixer.channels), NAN))
    return SpecLayer(mode=mode, conv=conv, first_node=mixer.width - 1, **own[mode])


def started(shape, ops):
    """Slots 2 and 5 have consumed 6 tokens each."""
    mixer = Mixer(shape, ops)
    for slot in (2, 5):
        mixer.clear(slot)
        mixer.run(mixer.inputs(6, seed=slot), [6], [slot])
    return mixer


def mix_trees(mixer, inputs, trees, spec, *, before):
    cu = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    flat = FlatTrees.of(cu, np.concatenate(trees).astype(np.int32))
    none = np.zeros(len(trees), np.int32)
    first_node, first_row = spec.first_node, mixer.width - 1
    taps = taps_of(flat, none, width=mixer.width, first_node=first_node, first_row=first_row)
    slots, rows = np.array([2, 5], np.int32), np.array([3, 1], np.int32)
    ragged = RaggedTrees(flat, cu[:-1] + np.int32(before), slots, rows, none, taps)
    view = mixer.ops.view
    out = torch.full((len(inputs[0]), mixer.heads * mixer.dv), NAN)
    pools = view(mixer.conv), view(mixer.state)
    arrays = [view(x) for x in inputs]
    mixer.ops.mix_kda_trees(*arrays, mixer.weights, ragged, *pools, spec, view(out))
    assert out[:before].isnan().all()
    return out[before:], flat


@backends
@shapes
@modes
def test_every_node_is_plain_decode_on_its_path(ops, shape, mode):
    mixer = started(shape, ops)
    before = mixer.state.clone(), mixer.conv.clone()
    trees, size = [CHAIN, RANDOM], 17
    inputs = mixer.inputs(3 + size, seed=7)
    spec = spec_layer(mode, mixer, len(RANDOM))
    o, flat = mix_trees(mixer, inputs, trees, spec, before=3)
    assert torch.equal(mixer.state.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(mixer.conv.nan_to_num(7), before[1].nan_to_num(7))
    exact = ops.name == "torch" and mode != "log"
    for tree, (parents, slot, row) in enumerate(zip(trees, (2, 5), (3, 1), strict=True)):
        first = 3 + int(flat.cu_nodes[tree])
        for node in range(len(parents)):
            plain = started(shape, ops)
            for step in flat.path(tree, node).tolist():
                token = cut(inputs, slice(first + step, first + step + 1))
                expected = plain.run(token, [1], [slot])[0]
            found = o[first - 3 + node]
            assert (
                torch.equal(found, expected)
                if exact
                else torch.allclose(found, expected, atol=2e-5)
            )
            if mode != "log":
                state = ops.tensor(spec.states)[row, node]
                assert torch.allclose(state, plain.state[slot], atol=2e-5)
    if mode != "snapshot":
        assert ops.tensor(spec.g)[1].isfinite().all()
        assert ops.tensor(spec.k)[[0, 2]].isnan().all()

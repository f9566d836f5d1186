"""The mixer of Mamba2: naive against chunked, compiled against torch, saves, splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.mamba2.recurrence import chunked, naive
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.rules import Inputs
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.state_bytes import MODES

SHAPES = [(2, 6, 12, 20, 4, 1), (1, 1, 33, 7, 2, 1), (4, 8, 16, 64, 4, 4), (1, 5, 24, 80, 3, 5)]
"""Hk, Hv, dk, dv, K, groups of the norm."""


def rule_inputs(tokens, groups=2, heads=4, dk=10, dv=6, dtype=torch.float64, rate=3.0):
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, groups, dk, dtype=dtype) for _ in range(2))
    v = torch.randn(tokens, heads, dv, dtype=dtype)
    dt = torch.rand(tokens, heads, dtype=dtype)
    inputs = Inputs(k, v, (-rate * dt).unsqueeze(2), dt)
    return q, inputs, torch.randn(heads, dk, dv, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_chunked_equals_naive(tokens):
    inputs = rule_inputs(tokens)
    o, states = naive(*inputs)
    saves = sorted({1, tokens // 2 + 1, tokens, min(tokens, 64)})
    o2, final, saved = chunked(*inputs, save_at=saves)
    assert torch.allclose(o2, o, atol=1e-10)
    assert torch.allclose(final, states[-1], atol=1e-10)
    for count, state in zip(saves, saved, strict=True):
        assert torch.allclose(state, states[count - 1], atol=1e-10)


def test_strong_decay_neither_overflows_nor_loses_digits():
    inputs = rule_inputs(100, rate=200.0, dtype=torch.float32)
    o, final, _ = chunked(*inputs)
    expected, states = naive(*inputs)
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.allclose(final, states[-1], atol=1e-5)


class Mixer:
    """Random weights of one shape, run by either backend on pools of their own."""

    def __init__(self, shape, ops, num_slots=12, dt_limits=(0.05, 1.5)):
        self.hk, self.hv, self.dk, self.dv, self.width, groups = shape
        torch.manual_seed(0)
        self.channels = 2 * self.hk * self.dk + self.hv * self.dv
        self.raw = Mamba2Weights(
            num_k_heads=self.hk,
            conv=torch.randn(self.channels, self.width) * 0.5,
            conv_bias=torch.randn(self.channels) * 0.5,
            decay_rate=-torch.rand(self.hv) * 4,
            dt_bias=torch.randn(self.hv),
            dt_limits=dt_limits,
            skip=torch.randn(self.hv),
            norm=torch.randn(self.hv * self.dv),
            num_norm_groups=groups,
            eps=1e-5,
        )
        self.ops = ops
        self.weights = ops.pack_mixer(self.raw)
        self.conv = torch.full((num_slots, self.width - 1, self.channels), float("nan"))
        self.state = torch.full((num_slots, self.hv, self.dk, self.dv), float("nan"))

    def clear(self, slot):
        self.conv[slot] = 0
        self.state[slot] = 0

    def inputs(self, tokens, seed=1):
        torch.manual_seed(seed)
        return torch.randn(tokens, self.channels + self.hv * self.dv + self.hv)

    def run(self, projected, lengths, slots, saves=()):
        """saves: (sequence, count, slot), sorted."""
        offsets = np.zeros(len(slots) + 1, np.int32)
        for sequence, _, _ in saves:
            offsets[sequence + 1 :] += 1
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = RaggedStates(
            cu,
            np.array(slots, np.int32),
            offsets,
            np.array([s[1] for s in saves], np.int32),
            np.array([s[2] for s in saves], np.int32),
        )
        view = self.ops.view
        out = self.ops.mix(view(projected), self.weights, batch, view(self.conv), view(self.state))
        return self.ops.tensor(out)


def by_hand(mixer, projected):
    """The definition from a zero state, token by token, in float64."""
    w, heads = mixer.raw, (mixer.hv, mixer.dk, mixer.dv)
    x = projected.double()
    raw, z, dt = x.split([mixer.channels, mixer.hv * mixer.dv, mixer.hv], dim=1)
    columns = torch.cat([raw.new_zeros(mixer.width - 1, mixer.channels), raw])
    state, outputs = torch.zeros(heads, dtype=torch.float64), []
    for t in range(len(x)):
        window = columns[t : t + mixer.width]
        mixed = F.silu((window * w.conv.double().T).sum(0) + w.conv_bias.double())
        q, k, v = mixed.split([mixer.hk * mixer.dk, mixer.hk * mixer.dk, mixer.hv * mixer.dv])
        spread = mixer.hv // mixer.hk
        q, k = (y.view(mixer.hk, mixer.dk).repeat_interleave(spread, 0) for y in (q, k))
        v = v.view(mixer.hv, mixer.dv)
        step = F.softplus(dt[t] + w.dt_bias.double()).clamp(*w.dt_limits)
        decay = (step * w.decay_rate.double()).exp()
        state = decay[:, None, None] * state + k[:, :, None] * (step[:, None] * v)[:, None, :]
        y = (state * q[:, :, None]).sum(1) + w.skip.double()[:, None] * v
        y = (y.flatten() * F.silu(z[t])).view(w.num_norm_groups, -1)
        y = y / (y.square().mean(1, keepdim=True) + w.eps).sqrt()
        outputs.append(y.flatten() * w.norm.double())
    return torch.stack(outputs), state


@pytest.mark.parametrize("backend", [CompiledOps, TorchOps])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_mixer_is_as_defined(backend, shape):
    mixer = Mixer(shape, backend())
    mixer.clear(3)
    x = mixer.inputs(70)
    o = mixer.run(x, [70], [3])
    expected, state = by_hand(mixer, x)
    assert torch.allclose(o.double(), expected, atol=2e-4)
    assert torch.allclose(mixer.state[3].double(), state, atol=2e-5)
    kept = mixer.width - 1
    assert torch.equal(mixer.conv[3], x[70 - kept :, : mixer.channels])


def test_time_steps_without_limits():
    results = []
    for ops in (CompiledOps(), TorchOps()):
        mixer = Mixer(SHAPES[0], ops, dt_limits=(0.0, math.inf))
        mixer.clear(1)
        x = mixer.inputs(20)
        x[:, -mixer.hv :] *= 30  # beyond where softplus is linear
        results.append(mixer.run(x, [20], [1]))
    assert torch.allclose(*results, atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_torch_on_a_ragged_batch(shape):
    results = []
    for ops in (CompiledOps(), TorchOps()):
        mixer = Mixer(shape, ops)
        lengths, slots = [1, 70, 0, 3, 2], [4, 1, 10, 7, 2]
        for slot in slots:
            mixer.clear(slot)
        saves = [(1, 1, 5), (1, 64, 6), (1, 70, 8), (3, 2, 9)]
        x = mixer.inputs(sum(lengths))
        first = mixer.run(x, lengths, slots, saves)
        second = mixer.run(x.flip(0), lengths, slots)
        results.append((first, second, mixer.state, mixer.conv))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-4, equal_nan=True)
    assert results[0][2][[0, 3, 11]].isnan().all()
    assert (results[0][2][10] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_saves_at_every_position_are_bitwise_the_state_of_a_shorter_run(shape):
    mixer = Mixer(shape, CompiledOps(), num_slots=12)
    x = mixer.inputs(9)
    mixer.clear(1)
    mixer.run(x, [9], [1], [(0, count, count + 2) for count in range(1, 10)])
    for count in range(1, 10):
        shorter = Mixer(shape, CompiledOps())
        shorter.clear(1)
        shorter.run(x[:count], [count], [1])
        assert torch.equal(shorter.state[1], mixer.state[count + 2])
        assert torch.equal(shorter.conv[1], mixer.conv[count + 2])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cut", [1, 2, 64, 100])
def test_splitting_changes_no_bit(shape, cut):
    whole, split = Mixer(shape, CompiledOps()), Mixer(shape, CompiledOps())
    x = whole.inputs(130)
    whole.clear(1)
    split.clear(1)
    o = whole.run(x, [130], [1])
    parts = [split.run(x[i : i + cut], [len(x[i : i + cut])], [1]) for i in range(0, 130, cut)]
    assert torch.equal(torch.cat(parts), o)
    assert torch.equal(split.state[1], whole.state[1])
    assert torch.equal(split.conv[1], whole.conv[1])


@pytest.mark.parametrize("shape", [SHAPES[2], (1, 24, 16, 64, 4, 1)])
def test_neighbours_and_threads_change_no_bit(shape):
    alone, among = Mixer(shape, CompiledOps()), Mixer(shape, CompiledOps())
    for mixer in (alone, among):
        for slot in range(12):
            mixer.clear(slot)
    alone.ops._parallel_from = math.inf
    among.ops._parallel_from = -1
    x = alone.inputs(11)
    o = alone.run(x[3:4], [1], [5])  # one thread
    many = among.run(x, [1] * 11, [1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 11])  # all threads
    assert torch.equal(o[0], many[3])
    assert torch.equal(alone.state[5], among.state[5])
    assert torch.equal(alone.conv[5], among.conv[5])


@pytest.mark.parametrize("backend", [CompiledOps, TorchOps])
def test_a_faulty_sequence_harms_no_other(backend):
    mixer = Mixer(SHAPES[0], backend())
    mixer.clear(1)
    mixer.clear(3)
    x = mixer.inputs(6)
    x[4, -1] = float("nan")  # a time step: clamping must not hide it
    o = mixer.run(x, [2, 2, 2], [1, 2, 3])  # slot 2 is NaN
    assert o[:2].isfinite().all()
    assert o[2:4].isnan().any()
    assert o[4].isnan().any()


def verify(mixer, nodes, parents, slot, mode):
    """Outputs of one draft tree on the state in ``slot``, without a log; the draft buffers."""
    size, kept, view = len(parents), mixer.width - 1, mixer.ops.view
    flat = FlatTrees.of(np.array([0, size], np.int32), np.array(parents, np.int32))
    none = np.zeros(1, np.int32)
    trees = RaggedTrees(
        flat, none, np.array([slot], np.int32), none + 1, none,
        taps_of(flat, none, width=mixer.width, first_node=kept, first_row=kept),
    )  # fmt: skip
    values = (2, size, mixer.hv, mixer.dv)
    spec = SpecLayer(
        mode,
        view(torch.full((2, kept + size, mixer.channels), float("nan"))),
        kept,
        states=view(torch.full((2, size, mixer.hv, mixer.dk, mixer.dv), float("nan"))),
        k=view(torch.empty(2, size, mixer.hk, mixer.dk)),
        v=view(torch.empty(values)),
        u=view(torch.empty(values)),
        g=view(torch.empty(2, size, mixer.hv, 1)),
        beta=view(torch.empty(2, size, mixer.hv)),
    )
    out = torch.empty(size, mixer.hv * mixer.dv)
    pools = view(mixer.conv), view(mixer.state)
    mixer.ops.mix_trees(view(nodes), mixer.weights, trees, *pools, spec, view(out))
    return out, spec


@pytest.mark.parametrize("backend", [CompiledOps, TorchOps])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1, 2, 5]])
def test_nodes_of_a_draft_tree_are_plain_decode_on_their_paths(backend, mode, shape, parents):
    """In torch bit by bit where states are kept; the compiled backend verifies in torch."""
    mixer = Mixer(shape, backend())
    mixer.clear(1)
    mixer.run(mixer.inputs(7), [7], [1])
    nodes, before = mixer.inputs(len(parents), seed=2), mixer.state.clone()
    out, spec = verify(mixer, nodes, parents, 1, mode)
    assert torch.equal(mixer.state[1], before[1])
    is_exact = mode != "log" and backend is TorchOps
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        mixer.state[2], mixer.conv[2] = mixer.state[1], mixer.conv[1]
        plain = [mixer.run(nodes[i : i + 1], [1], [2])[0] for i in path]
        assert torch.allclose(out[node], plain[-1], atol=0.0 if is_exact else 1e-4, rtol=0.0)
        if is_exact:
            assert torch.equal(spec.states[1, node], mixer.state[2])

"""Kimi delta attention: naive against chunked, compiled against torch, saves, splits, decays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.kda.compiled import softplus32
from hyradix.kernels.kda.recurrence import chunked, naive
from hyradix.kernels.kda.reference import KdaWeights, log_decay
from hyradix.kernels.torch_ops import TorchOps

SHAPES = [(6, 12, 20, 4, None), (1, 33, 7, 2, -5.0), (3, 16, 48, 4, None), (8, 64, 64, 4, -5.0)]
"""H, dk, dv, K, lower bound of the decay."""
BOTH = pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]])


def rule_inputs(tokens, heads=3, dk=10, dv=6, dtype=torch.float64):
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, heads, dk, dtype=dtype) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(tokens, heads, dv, dtype=dtype)
    g = -torch.rand(tokens, heads, dk, dtype=dtype) * 3
    beta = torch.rand(tokens, heads, dtype=dtype)
    return q, k, v, g, beta, torch.randn(heads, dk, dv, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_chunked_equals_naive(tokens):
    inputs = rule_inputs(tokens)
    o, states = naive(*inputs)
    saves = sorted({1, tokens // 2 + 1, tokens, min(tokens, 16)})
    o2, final, saved = chunked(*inputs, save_at=saves)
    assert torch.allclose(o2, o, atol=1e-12)
    assert torch.allclose(final, states[-1], atol=1e-12)
    for count, state in zip(saves, saved, strict=True):
        assert torch.allclose(state, states[count - 1], atol=1e-12)


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta, state = rule_inputs(100, dtype=torch.float32)
    o, final, _ = chunked(q, k, v, g * 60, beta, state)
    expected, states = naive(q, k, v, g * 60, beta, state)
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.allclose(final, states[-1], atol=1e-5)


def test_softplus_of_compiled_kernels():
    x = np.concatenate([np.linspace(-86, 86, 3001), [-0.0, 0.0, 1e-8, 20.0, 20.1]])
    x = x.astype(np.float32)
    expected = F.softplus(torch.from_numpy(x).double(), threshold=100).numpy()
    ours = np.array([softplus32(value) for value in x])
    assert np.abs(ours / expected - 1).max() < 1e-6
    assert np.isnan(softplus32(np.float32("nan")))


class Mixer:
    """Random weights of one shape, run by either backend on pools of their own."""

    def __init__(self, shape, ops, num_slots=12):
        self.heads, self.dk, self.dv, self.width, lower_bound = shape
        torch.manual_seed(0)
        self.channels = self.heads * (2 * self.dk + self.dv)
        self.raw = KdaWeights(
            num_heads=self.heads,
            conv=torch.randn(self.channels, self.width),
            rate=torch.rand(self.heads) * 4,
            dt_bias=torch.randn(self.heads * self.dk),
            norm=torch.randn(self.dv),
            eps=1e-6,
            lower_bound=lower_bound,
        )
        self.ops = ops
        self.weights = ops.pack_kda(self.raw)
        self.conv = torch.full((num_slots, self.width - 1, self.channels), float("nan"))
        self.state = torch.full((num_slots, self.heads, self.dk, self.dv), float("nan"))

    def clear(self, slot):
        self.conv[slot] = 0
        self.state[slot] = 0

    def inputs(self, tokens, seed=1):
        torch.manual_seed(seed)
        sizes = (self.channels + self.heads + 3, self.heads * self.dk, self.heads * self.dv)
        return [torch.randn(tokens, size) for size in sizes]

    def run(self, inputs, lengths, slots, saves=()):
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
        arrays = [view(x) for x in inputs]
        out = self.ops.mix_kda(*arrays, self.weights, batch, view(self.conv), view(self.state))
        return self.ops.tensor(out)


def cut(inputs, piece):
    return [x[piece].contiguous() for x in inputs]


def by_definition(mixer, inputs):
    """One cold sequence, float64, written from the definition alone."""
    projected, forget, gate = (x.double() for x in inputs)
    raw, heads, tokens = mixer.raw, mixer.heads, projected.shape[0]
    x = projected[:, : mixer.channels]
    mixed = torch.zeros_like(x)
    for t in range(tokens):
        for j in range(mixer.width):
            if t - j >= 0:
                mixed[t] += raw.conv[:, mixer.width - 1 - j].double() * x[t - j]
    mixed = mixed * mixed.sigmoid()
    sizes = [heads * mixer.dk, heads * mixer.dk, heads * mixer.dv]
    q, k, v = (part.reshape(tokens, heads, -1) for part in mixed.split(sizes, 1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    f = (forget + raw.dt_bias.double()).reshape(tokens, heads, -1)
    rate = raw.rate.double()[:, None]
    if raw.lower_bound is None:
        g = -rate * (1 + f.exp()).log()
    else:
        g = raw.lower_bound / (1 + (-rate * f).exp())
    beta = projected[:, mixer.channels : mixer.channels + heads].sigmoid()
    start = torch.zeros(heads, mixer.dk, mixer.dv, dtype=torch.float64)
    o, states = naive(q / mixer.dk**0.5, k, v, g, beta, start)
    o = o / (o.square().mean(-1, keepdim=True) + raw.eps).sqrt() * raw.norm.double()
    return o.flatten(1) * gate.sigmoid(), states


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()], ids=lambda ops: ops.name)
def test_one_sequence_equals_the_definition(shape, ops):
    mixer = Mixer(shape, ops)
    inputs = mixer.inputs(40)
    mixer.clear(1)
    o = mixer.run(inputs, [40], [1], [(0, 17, 2)])
    expected, states = by_definition(mixer, inputs)
    assert torch.allclose(o.double(), expected, atol=2e-5)
    assert torch.allclose(mixer.state[1].double(), states[-1], atol=2e-5)
    assert torch.allclose(mixer.state[2].double(), states[16], atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_torch_on_a_ragged_batch(shape):
    results = []
    for ops in (CompiledOps(), TorchOps()):
        mixer = Mixer(shape, ops)
        lengths, slots = [1, 70, 3, 2], [4, 1, 7, 2]
        for slot in slots:
            mixer.clear(slot)
        saves = [(1, 1, 5), (1, 64, 6), (1, 70, 8), (2, 2, 9)]
        x = mixer.inputs(sum(lengths))
        first = mixer.run(x, lengths, slots, saves)
        second = mixer.run([part.flip(0) for part in x], lengths, slots)
        results.append((first, second, mixer.state, mixer.conv))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-5, equal_nan=True)
    assert results[0][2][[0, 3, 10, 11]].isnan().all()


@BOTH
def test_saves_at_every_position_are_bitwise_the_state_of_a_shorter_run(shape):
    mixer = Mixer(shape, CompiledOps(), num_slots=12)
    x = mixer.inputs(9)
    mixer.clear(1)
    mixer.run(x, [9], [1], [(0, count, count + 2) for count in range(1, 10)])
    for count in range(1, 10):
        shorter = Mixer(shape, CompiledOps())
        shorter.clear(1)
        shorter.run(cut(x, slice(count)), [count], [1])
        assert torch.equal(shorter.state[1], mixer.state[count + 2])
        assert torch.equal(shorter.conv[1], mixer.conv[count + 2])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 64, 100])
def test_splitting_changes_no_bit(shape, size):
    whole, split = Mixer(shape, CompiledOps()), Mixer(shape, CompiledOps())
    x = whole.inputs(130)
    whole.clear(1)
    split.clear(1)
    o = whole.run(x, [130], [1])
    parts = []
    for first in range(0, 130, size):
        piece = cut(x, slice(first, first + size))
        parts.append(split.run(piece, [len(piece[0])], [1]))
    assert torch.equal(torch.cat(parts), o)
    assert torch.equal(split.state[1], whole.state[1])
    assert torch.equal(split.conv[1], whole.conv[1])


def test_neighbours_and_threads_change_no_bit():
    shape = SHAPES[3]
    alone, among = Mixer(shape, CompiledOps()), Mixer(shape, CompiledOps())
    for mixer in (alone, among):
        for slot in range(12):
            mixer.clear(slot)
    x = alone.inputs(11)
    o = alone.run(cut(x, slice(3, 4)), [1], [5])  # one thread
    many = among.run(x, [1] * 11, [1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 11])  # all threads
    assert torch.equal(o[0], many[3])
    assert torch.equal(alone.state[5], among.state[5])


@BOTH
def test_a_faulty_sequence_harms_no_other(shape):
    mixer = Mixer(shape, CompiledOps())
    mixer.clear(1)
    o = mixer.run(mixer.inputs(4), [2, 2], [1, 2])  # slot 2 is NaN
    assert o[:2].isfinite().all()
    assert o[2:].isnan().any()


def test_the_bounded_decay_stays_above_its_bound():
    weights = Mixer(SHAPES[1], TorchOps()).raw
    g = log_decay(torch.randn(50, 33) * 100, weights)
    assert g.min() >= -5.0
    assert g.max() <= 0.0

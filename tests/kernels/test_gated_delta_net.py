"""The recurrent mixer: naive against chunked, compiled against torch, saves, splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.gated_delta_rule.reference import chunked, naive, step_
from hyradix.kernels.torch_ops import TorchOps

SHAPES = [(2, 6, 12, 20, 4), (1, 1, 33, 7, 2), (3, 3, 16, 48, 4), (4, 8, 64, 64, 4)]
"""Hk, Hv, dk, dv, K."""


def rule_inputs(tokens, heads=3, dk=10, dv=6, dtype=torch.float64):
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, heads, dk, dtype=dtype) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(tokens, heads, dv, dtype=dtype)
    g = -torch.rand(tokens, heads, dtype=dtype) * 3
    beta = torch.rand(tokens, heads, dtype=dtype)
    return q, k, v, g, beta, torch.randn(heads, dk, dv, dtype=dtype)


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


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta, state = rule_inputs(100, dtype=torch.float32)
    o, final, _ = chunked(q, k, v, g * 60, beta, state)
    expected, states = naive(q, k, v, g * 60, beta, state)
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.allclose(final, states[-1], atol=1e-5)


def test_step_by_slot_equals_naive():
    q, k, v, g, beta, state = rule_inputs(1)
    pool = torch.full((5, *state.shape), float("nan"), dtype=state.dtype)
    pool[3] = state
    o = step_(q, k, v, g, beta, pool, torch.tensor([3]))
    expected, states = naive(q, k, v, g, beta, state)
    assert torch.allclose(o, expected)
    assert torch.allclose(pool[3], states[0])
    assert pool[[0, 1, 2, 4]].isnan().all()


class Mixer:
    """Random weights of one shape, run by either backend on pools of their own."""

    def __init__(self, shape, ops, num_slots=12, *, decay=4.0):
        self.hk, self.hv, self.dk, self.dv, self.width = shape
        torch.manual_seed(0)
        self.channels = 2 * self.hk * self.dk + self.hv * self.dv
        weights = MixerWeights(
            num_k_heads=self.hk,
            conv=torch.randn(self.channels, self.width),
            decay_rate=-torch.rand(self.hv) * decay,
            dt_bias=torch.randn(self.hv),
            norm=torch.randn(self.dv),
            eps=1e-6,
        )
        self.ops = ops
        self.weights = ops.pack_mixer(weights)
        self.conv = torch.full((num_slots, self.width - 1, self.channels), float("nan"))
        self.state = torch.full((num_slots, self.hv, self.dk, self.dv), float("nan"))

    def clear(self, slot):
        self.conv[slot] = 0
        self.state[slot] = 0

    def inputs(self, tokens, seed=1):
        torch.manual_seed(seed)
        return torch.randn(tokens, self.channels + self.hv * self.dv + 2 * self.hv)

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
        second = mixer.run(x.flip(0), lengths, slots)
        results.append((first, second, mixer.state, mixer.conv))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-5, equal_nan=True)
    assert results[0][2][[0, 3, 10, 11]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES[:3])
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


def test_neighbours_and_threads_change_no_bit():
    shape = SHAPES[3]
    alone, among = Mixer(shape, CompiledOps()), Mixer(shape, CompiledOps())
    for mixer in (alone, among):
        for slot in range(12):
            mixer.clear(slot)
    x = alone.inputs(11)
    o = alone.run(x[3:4], [1], [5])  # one thread
    many = among.run(x, [1] * 11, [1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 11])  # all threads
    assert torch.equal(o[0], many[3])
    assert torch.equal(alone.state[5], among.state[5])


def test_a_faulty_sequence_harms_no_other():
    mixer = Mixer(SHAPES[0], CompiledOps())
    mixer.clear(1)
    o = mixer.run(mixer.inputs(4), [2, 2], [1, 2])  # slot 2 is NaN
    assert o[:2].isfinite().all()
    assert o[2:].isnan().any()

"""Gated attention: compiled against torch, scattered slots, shared positions, chunking."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.attention.reference import AttentionWeights, gather
from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.rotary.reference import rotary_table
from hyradix.kernels.torch_ops import TorchOps

SHAPES = [(6, 2, 24, 8), (1, 1, 64, 64), (8, 8, 20, 10), (4, 1, 7, 2)]
"""H, Hkv, D, rotary dimensions."""


class Attention:
    def __init__(self, shape, ops, slots=400):
        self.heads, self.kv_heads, self.dim, rotary = shape
        torch.manual_seed(0)
        weights = AttentionWeights(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            eps=1e-6,
            q_norm=torch.randn(self.dim),
            k_norm=torch.randn(self.dim),
            angles=rotary_table(300, rotary, 10_000.0),
        )
        self.ops = ops
        self.weights = ops.pack_attention(weights)
        self.k, self.v = (torch.full((slots, self.kv_heads, self.dim), float("nan")) for _ in "kv")
        order = np.random.default_rng(0).permutation(np.arange(1, 385))
        self.table = order.astype(np.int32).reshape(3, 128)
        self.table[2] = np.sort(self.table[2])

    def inputs(self, tokens, seed=3):
        torch.manual_seed(seed)
        return torch.randn(tokens, 2 * (self.heads + self.kv_heads) * self.dim)

    def run(self, projected, rows, starts, lengths, write_from=None):
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows, starts = np.array(rows, np.int32), np.array(starts, np.int32)
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        ).astype(np.int32)
        slots = self.table[np.repeat(rows, lengths), positions]
        if write_from is not None:
            slots = np.where(positions >= write_from, slots, np.int32(0))
        batch = RaggedQueries.of(cu, rows, starts, positions, slots, self.table)
        view = self.ops.view
        out = self.ops.attention(view(projected), self.weights, batch, view(self.k), view(self.v))
        return self.ops.tensor(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_torch_on_a_ragged_batch(shape):
    results = []
    for ops in (CompiledOps(), TorchOps()):
        attention = Attention(shape, ops)
        a = attention.run(attention.inputs(91), [2, 0, 1], [0, 0, 0], [60, 1, 30])
        b = attention.run(attention.inputs(44), [0, 1, 2], [1, 30, 60], [3, 40, 1])
        results.append((a, b, attention.k, attention.v))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-5, equal_nan=True)
    assert results[0][0].isfinite().all()


def test_decode_equals_prefill_and_is_bitwise_independent_of_the_batch():
    shape = SHAPES[0]
    x = Attention(shape, CompiledOps()).inputs(40)
    whole = Attention(shape, CompiledOps())
    expected = whole.run(x, [0], [0], [40])
    one = Attention(shape, CompiledOps())
    parts = [one.run(x[i : i + 1], [0], [i], [1]) for i in range(40)]
    assert torch.allclose(torch.cat(parts), expected, atol=2e-5)
    pairs = Attention(shape, CompiledOps())
    other = [pairs.run(x[i : i + 2].repeat(2, 1), [0, 1], [i, i], [2, 2]) for i in range(0, 40, 2)]
    assert torch.equal(torch.cat([o[:2] for o in other]), torch.cat(parts))
    assert torch.equal(torch.cat([o[2:] for o in other]), torch.cat(parts))


@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()])
def test_shared_positions_are_read_and_not_written(ops):
    attention = Attention(SHAPES[0], ops)
    x = attention.inputs(30)
    first = attention.run(x, [1], [0], [30])
    before = attention.k.clone()
    again = attention.run(torch.cat([x[:20] * 2, x[20:]]), [1], [0], [30], write_from=20)
    assert torch.equal(attention.k.nan_to_num(), before.nan_to_num())
    assert torch.allclose(again[20:], first[20:], atol=2e-5)


def test_ascending_runs_are_views_and_others_are_not():
    pool = torch.arange(20.0).reshape(10, 1, 2)
    assert gather(pool, np.array([3, 4, 5], np.int32)).data_ptr() == pool[3].data_ptr()
    for slots in ([3, 5, 5], [3, 4, 6], [5, 4, 3], [4, 3, 6]):
        index = np.array(slots, np.int32)
        assert torch.equal(gather(pool, index), pool[slots])

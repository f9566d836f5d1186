"""Latent attention: both forms against plain attention, compiled against torch, scattered slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.mla import compiled, reference
from hyradix.kernels.mla.reference import LatentWeights, absorbed, attend_row, expanded
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees

SHAPES = [(6, 12, 5, 20, 33), (1, 16, 0, 8, 16), (8, 32, 16, 32, 64), (4, 7, 2, 9, 24)]
"""H, nope, shared, V, rank."""


def random_weights(shape):
    heads, nope, shared, v_dim, rank = shape
    torch.manual_seed(0)
    return LatentWeights(
        num_shared=shared,
        keys=torch.randn(heads, nope, rank) / nope**0.5,
        values=torch.randn(heads, v_dim, rank) / rank**0.5,
        norm=torch.randn(rank),
        eps=1e-6,
    )


class Attention:
    def __init__(self, shape, ops, slots=400):
        self.shape = shape
        heads, nope, shared, _, rank = shape
        self.raw = random_weights(shape)
        self.ops = ops
        self.weights = ops.pack_latent_attention(self.raw)
        self.width = heads * (nope + shared) + rank + shared
        self.pool = torch.full((slots, 1, rank + shared), float("nan"))
        order = np.random.default_rng(0).permutation(np.arange(1, 385))
        self.table = order.astype(np.int32).reshape(3, 128)
        self.table[2] = np.sort(self.table[2])

    def inputs(self, tokens, seed=3):
        torch.manual_seed(seed)
        return torch.randn(tokens, self.width)

    def run(self, projected, rows, starts, lengths, write_from=None, first=0):
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows, starts = np.array(rows, np.int32), np.array(starts, np.int32)
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        ).astype(np.int32)
        slots = self.table[np.repeat(rows, lengths), positions]
        if write_from is not None:
            slots = np.where(positions >= write_from, slots, np.int32(0))
        batch = RaggedQueries.of(cu, rows, starts, positions, slots, self.table, first=first)
        view = self.ops.view
        out = self.ops.latent_attention(view(projected), self.weights, batch, view(self.pool))
        return self.ops.tensor(out)


def by_definition(attention, projected):
    """One cold sequence, float64, with every key and value written out."""
    raw, (heads, nope, shared, v_dim, rank) = attention.raw, attention.shape
    x = projected.double()
    q = x[:, : heads * (nope + shared)].reshape(len(x), heads, nope + shared)
    c, r = x[:, heads * (nope + shared) :].split([rank, shared], 1)
    c = c / (c.square().mean(1, keepdim=True) + raw.eps).sqrt() * raw.norm.double()
    out = torch.empty(len(x), heads, v_dim, dtype=torch.float64)
    for h in range(heads):
        k = torch.cat([c @ raw.keys[h].double().T, r], 1)
        v = c @ raw.values[h].double().T
        for t in range(len(x)):
            weights = (k[: t + 1] @ q[t, h] / (nope + shared) ** 0.5).softmax(0)
            out[t, h] = weights @ v[: t + 1]
    return out.flatten(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()], ids=lambda ops: ops.name)
def test_prefill_and_decode_equal_the_definition(shape, ops):
    attention = Attention(shape, ops)
    x = attention.inputs(60)
    parts = [attention.run(x[:40], [1], [0], [40])]
    parts += [attention.run(x[i : i + 1], [1], [i], [1]) for i in range(40, 60)]
    expected = by_definition(attention, x)
    assert torch.allclose(torch.cat(parts).double(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 50])
def test_both_forms_agree_in_any_blocks(shape, start, monkeypatch):
    weights = random_weights(shape)
    heads, nope, shared, _, rank = shape
    q, rows = torch.randn(70, heads, nope + shared), torch.randn(start + 70, rank + shared)
    expected = absorbed(q, rows, start, weights)
    assert torch.allclose(expanded(q, rows, start, weights), expected, atol=1e-5)
    monkeypatch.setattr(reference, "MAX_SCORES", 2000)
    for form in (absorbed, expanded):
        assert torch.allclose(form(q, rows, start, weights), expected, atol=1e-5)


def test_the_cheaper_form_is_taken(monkeypatch):
    weights = random_weights(SHAPES[2])
    taken = []
    for form in (absorbed, expanded):
        name = form.__name__
        monkeypatch.setattr(
            reference, name, lambda q, *rest, name=name: taken.append((name, len(q)))
        )
    for n in (1, 64, 65):  # (64 + 16) + 64 - (32 + 16) - 32 = 64 a key, against 64 (32 + 32)
        attend_row(torch.zeros(n, 8, 48), np.arange(1, 101), 0, torch.zeros(200, 80), weights)
    assert [name for name, _ in taken] == ["absorbed", "absorbed", "expanded"]


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_torch_on_a_ragged_batch(shape):
    results = []
    for ops in (CompiledOps(), TorchOps()):
        attention = Attention(shape, ops)
        a = attention.run(attention.inputs(91), [2, 0, 1], [0, 0, 0], [60, 1, 30])
        b = attention.run(attention.inputs(44), [0, 1, 2], [1, 30, 60], [3, 40, 1])
        results.append((a, b, attention.pool))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-5, equal_nan=True)
    assert results[0][0].isfinite().all()


def test_decode_is_independent_of_the_batch():
    shape = SHAPES[0]
    x = Attention(shape, CompiledOps()).inputs(40)
    one, pairs = Attention(shape, CompiledOps()), Attention(shape, CompiledOps())
    alone = [one.run(x[i : i + 1], [0], [i], [1]) for i in range(40)]
    among = [pairs.run(x[i : i + 2].repeat(2, 1), [0, 1], [i, i], [2, 2]) for i in range(0, 40, 2)]
    for mine in ([o[:2] for o in among], [o[2:] for o in among]):
        assert torch.allclose(torch.cat(mine), torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()], ids=lambda ops: ops.name)
def test_shared_positions_are_read_and_not_written(ops):
    attention = Attention(SHAPES[0], ops)
    x = attention.inputs(30)
    first = attention.run(x, [1], [0], [30])
    before = attention.pool.clone()
    again = attention.run(torch.cat([x[:20] * 2, x[20:]]), [1], [0], [30], write_from=20)
    assert torch.equal(attention.pool.nan_to_num(), before.nan_to_num())
    assert torch.allclose(again[20:], first[20:], atol=2e-5)


@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()], ids=lambda ops: ops.name)
def test_a_faulty_row_harms_no_other(ops):
    attention = Attention(SHAPES[0], ops)
    attention.run(attention.inputs(9), [0], [0], [9])
    out = attention.run(attention.inputs(2), [0, 1], [9, 5], [1, 1])  # row 1 never wrote its first
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_threads_and_spans_of_heads_change_no_bit():
    torch.manual_seed(1)
    query, pool = torch.randn(3, 12, 40).numpy(), torch.randn(300, 1, 40).numpy()
    table = np.random.default_rng(0).permutation(300).astype(np.int32).reshape(3, 100)
    rows, lengths = np.array([2, 0, 1], np.int32), np.array([100, 1, 65], np.int32)
    no_tails = np.zeros(4, np.int32), np.zeros(0, np.int32)
    sees = (rows, 0, lengths, *no_tails)
    expected = np.empty((3, 12, 35), np.float32)
    compiled._decode_serial(query, *sees, table, pool, expected)
    for span in (4, 8, 12):
        context = np.full_like(expected, np.nan)
        compiled._decode_parallel(query, *sees, table, pool, context, span)
        assert np.array_equal(context, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ops", [CompiledOps(), TorchOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("first", [0, 1])
def test_every_node_of_a_draft_tree_is_plain_decode_on_its_path(shape, ops, first):
    """Two rows in front, one of them long; then two trees over prefixes of 20 and 33."""
    trees, starts, rows = [[-1, 0, 0, 1, 1, 4], [-1, 0, 1]], (20, 33), (0, 1)
    cu = np.array([0, 6, 9], np.int32)
    flat = FlatTrees.of(cu, np.concatenate(trees).astype(np.int32))
    attention = Attention(shape, ops)
    prefix = attention.inputs(53)
    lengths = [start - first for start in starts]
    attention.run(prefix[: sum(lengths)], list(rows), [first, first], lengths, first=first)
    x = attention.inputs(9, seed=5)
    nodes = np.arange(9, dtype=np.int32)
    columns = nodes - np.repeat(cu[:-1], np.diff(cu)) + np.repeat(np.int32(starts), np.diff(cu))
    positions = (np.repeat(np.int32(starts), np.diff(cu)) + flat.depths).astype(np.int32)
    table = attention.table
    batch = RaggedQueries.of(
        cu, np.array(rows, np.int32), np.array(starts, np.int32), positions,
        table[np.repeat(rows, np.diff(cu)), columns], table, trees=flat, first=first,
    )  # fmt: skip
    view = ops.view
    out = ops.latent_attention(view(x), attention.weights, batch, view(attention.pool))
    for tree, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for node in range(len(trees[tree])):
            plain = Attention(shape, ops)
            plain.run(prefix[: sum(lengths)], list(rows), [first, first], lengths, first=first)
            for depth, step in enumerate(flat.path(tree, node).tolist()):
                token = int(cu[tree]) + step
                expected = plain.run(x[token : token + 1], [row], [start + depth], [1], first=first)
            assert torch.allclose(ops.tensor(out)[int(cu[tree]) + node], expected[0], atol=1e-5)

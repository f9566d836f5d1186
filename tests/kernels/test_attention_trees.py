"""Attention over draft trees, from a first column on, and over frozen KV, in both backends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from tests.kernels.test_attention import SHAPES, Attention

BACKENDS = [CompiledOps(), TorchOps()]
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
W6 = [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]
CHAIN = list(range(-1, 11))


def flat(*trees):
    cu = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    return FlatTrees.of(cu, np.concatenate([*trees, np.zeros(0)]).astype(np.int32))


def run(attention, projected, rows, starts, trees, *, before=(), first=0):
    """Rows ``before`` as (row, start, tokens), then a tree per row, each with its own slots."""
    plain_rows, plain_starts, lengths = ([x[i] for x in before] for i in range(3))
    sizes = np.diff(trees.cu_nodes).tolist()
    lengths = np.array([*lengths, *sizes])
    rows = np.array([*plain_rows, *rows], np.int32)
    starts = np.array([*plain_starts, *starts], np.int32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = np.arange(cu[-1], dtype=np.int32) + np.repeat(starts - cu[:-1], lengths)
    slots = attention.table[np.repeat(rows, lengths), columns]
    positions = columns.astype(np.int32)
    num_nodes = int(trees.cu_nodes[-1])
    tree_starts = np.repeat(starts[len(before) :], sizes)
    positions[len(positions) - num_nodes :] = tree_starts + trees.depths
    batch = RaggedQueries.of(
        cu, rows, starts, positions, slots, attention.table, trees=trees, first=first
    )
    view = attention.ops.view
    out = attention.ops.attention(
        view(projected), attention.weights, batch, view(attention.k), view(attention.v)
    )
    return attention.ops.tensor(out)


@backends
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [0, 1])
def test_a_chain_has_the_bits_of_plain_decode(ops, shape, first):
    x = Attention(shape, ops).inputs(53)
    results = []
    for as_tree in (True, False):
        attention = Attention(shape, ops)
        run(attention, x[:40], [], [], flat(), before=[(0, first, 40)], first=first)
        start, drafts = 40 + first, x[40:52]
        if as_tree:
            o = run(attention, drafts, [0], [start], flat(CHAIN), first=first)
        else:
            parts = [
                run(attention, drafts[i : i + 1], [], [], flat(), before=[(0, start + i, 1)],
                    first=first)
                for i in range(12)
            ]  # fmt: skip
            o = torch.cat(parts)
        results.append((o, attention.k))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].nan_to_num(), results[1][1].nan_to_num())


@backends
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_node_sees_the_prefix_and_its_own_path(ops, shape):
    """Each node of W6's tree equals the last token of a chain of its path."""
    x, start = Attention(shape, ops).inputs(60), 33
    attention = Attention(shape, ops)
    run(attention, x[:start], [], [], flat(), before=[(1, 0, start)])
    nodes = x[start : start + 10]
    o = run(attention, torch.cat([x[50:55], nodes]), [1], [start], flat(W6), before=[(2, 0, 5)])[5:]
    trees = flat(W6)
    for node in range(10):
        path = trees.path(0, node)
        alone = Attention(shape, ops)
        run(alone, x[:start], [], [], flat(), before=[(1, 0, start)])
        chain = run(alone, nodes[path], [1], [start], flat(CHAIN[: len(path)]))
        assert torch.equal(o[node], chain[-1])


@backends
def test_w6_perturbing_node_3_changes_nobody(ops):
    results = []
    for factor in (1.0, float("nan")):
        attention = Attention(SHAPES[0], ops)
        x = attention.inputs(40)
        x[23] *= factor
        run(attention, x[:20], [], [], flat(), before=[(0, 0, 20)])
        results.append(run(attention, x[20:30], [0], [20], flat(W6)))
    others = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert torch.equal(results[0][others], results[1][others])
    assert results[1][3].isnan().all()


def test_compiled_equals_torch_on_trees_behind_other_rows():
    results = []
    for ops in BACKENDS:
        attention = Attention(SHAPES[0], ops)
        x = attention.inputs(140)
        run(attention, x[:50], [], [], flat(), before=[(0, 0, 30), (1, 0, 20)])
        trees = flat(W6, [], CHAIN)
        o = run(
            attention, x[50:94], [0, 1, 1], [30, 20, 20], trees, before=[(2, 0, 21), (2, 21, 1)]
        )
        results.append((o, attention.k, attention.v))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=2e-5, equal_nan=True)
    assert results[0][0].isfinite().all()


@backends
def test_nothing_before_the_first_column_is_read(ops):
    attention = Attention(SHAPES[0], ops)
    x = attention.inputs(60)
    run(attention, x[:39], [], [], flat(), before=[(0, 1, 39)], first=1)
    assert attention.k[attention.table[0, 0]].isnan().all()
    o = run(attention, x[40:53], [0], [40], flat(W6), before=[(1, 1, 3)], first=1)
    assert o.isfinite().all()


def frozen(attention, projected, rows, positions, k, v, *, first=0):
    rows, positions = np.array(rows, np.int32), np.array(positions, np.int32)
    cu = np.arange(len(rows) + 1, dtype=np.int32)
    batch = RaggedQueries.of(
        cu, rows, positions, positions, np.zeros(len(rows), np.int32), attention.table, first=first
    )
    out = attention.ops.attend_frozen(attention.ops.view(projected), attention.weights, batch, k, v)
    return attention.ops.tensor(out)


@backends
@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_attention_is_attention_without_the_token_s_own_kv(ops, shape):
    """A token that is asked again at its own position, its KV being there, gets the same."""
    attention = Attention(shape, ops)
    x = attention.inputs(30)
    o = run(attention, x[:29], [], [], flat(), before=[(0, 0, 29)])
    last = run(attention, x[29:], [], [], flat(), before=[(0, 29, 1)])
    k, v = (ops.read_only(ops.view(pool)) for pool in (attention.k, attention.v))
    before = attention.k.clone(), attention.v.clone()
    width = attention.heads * attention.dim
    q_gate = torch.cat([x[:, :width], x[:, -width:]], 1)
    again = frozen(attention, q_gate[[29, 28, 29]], [0, 0, 0], [29, 28, 29], k, v)
    assert torch.equal(again[0], last[0])
    assert torch.equal(again[2], last[0])
    assert torch.allclose(again[1], o[28], atol=2e-5)
    assert torch.equal(attention.k.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(attention.v.nan_to_num(), before[1].nan_to_num())


@backends
def test_frozen_attention_refuses_rows_that_attend_by_blocks(ops):
    attention = Attention(SHAPES[0], ops)
    starts = np.zeros(1, np.int32)
    positions = np.arange(9, dtype=np.int32)
    batch = RaggedQueries.of(
        np.array([0, 9], np.int32), starts, starts, positions, positions, attention.table
    )
    projected = ops.view(torch.randn(9, 2 * 6 * 24))
    with pytest.raises(ValueError, match="its own row"):
        ops.attend_frozen(
            projected, attention.weights, batch, ops.view(attention.k), ops.view(attention.v)
        )


@backends
def test_writing_through_lent_memory_raises(ops):
    attention = Attention(SHAPES[0], ops)
    attention.k.zero_()
    lent = ops.read_only(ops.view(attention.k))
    with pytest.raises(ValueError, match="read-only"):
        lent[0] = 1.0
    one = np.ones(1, np.int32)
    batch = RaggedQueries.of(np.arange(2, dtype=np.int32), one, one, one, one, attention.table)
    for k, v in ((lent, ops.view(attention.v)), (ops.view(attention.v), lent)):
        with pytest.raises(ValueError, match="read-only"):
            ops.attention(ops.view(attention.inputs(1)), attention.weights, batch, k, v)
    assert not attention.k.any()
    ops.view(attention.k)[0] = 1.0  # the owner still may
    assert bool((ops.tensor(ops.view(attention.k))[0] == 1).all())


def test_no_kernel_that_writes_compiles_for_lent_memory():
    from numba.core.errors import TypingError

    from hyradix.kernels.attention import compiled

    ops = CompiledOps()
    attention = Attention(SHAPES[0], ops)
    lent = ops.read_only(ops.view(attention.k))
    q = np.zeros((1, 6, 24), np.float32)
    one = np.ones(1, np.int32)
    _, *rest = attention.weights
    with pytest.raises(TypingError, match="read-only"):
        compiled.prepare(ops.view(attention.inputs(1)), one, one, *rest, lent, lent, q)


@backends
def test_lengths_may_be_set_apart_from_positions(ops):
    """The frozen head: one position for all draft steps, whatever its keys are."""
    attention = Attention(SHAPES[0], ops)
    x = attention.inputs(30)
    run(attention, x, [], [], flat(), before=[(0, 0, 30)])
    k, v = (ops.read_only(ops.view(pool)) for pool in (attention.k, attention.v))
    one = np.zeros(1, np.int32)
    batch = RaggedQueries.of(
        np.arange(2, dtype=np.int32), one, one + 29, one + 29, one, attention.table
    )
    q_gate = torch.randn(1, 2 * 6 * 24)
    outputs = [
        ops.tensor(
            ops.attend_frozen(
                ops.view(q_gate), attention.weights, replace(batch, short_lengths=one + n), k, v
            )
        )
        for n in (29, 30)
    ]
    assert not torch.equal(*outputs)
    assert all(o.isfinite().all() for o in outputs)


@backends
def test_norm_alone(ops):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 37), torch.randn(37)
    normed = ops.tensor(ops.norm(ops.view(x), ops.pack_norm(weight, 1e-6)))
    expected = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    assert torch.allclose(normed.double(), expected, atol=1e-5)

"""Compiled parts of latent attention: writing pool rows, and decode with absorbed queries.

Owns: the per-token work. Does not know: projections, who owns a slot.
Invariants: one query's result depends on its own row's slots only, summed in slot order by one
thread: it has the same bits in whatever batch it is computed. (The products before and after it,
``absorb`` and ``values_of``, are torch's: rounding apart.)
Read next: ``reference.py`` (the readable twin; shapes are described there).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange

from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.mla.reference import LatentWeights, absorb, attend_row, values_of
from hyradix.kernels.numba_support import compiled, exp32
from hyradix.kernels.simd import LANES, at, vfma, vmul, vset, vsum
from hyradix.kernels.simd_rows import copy, load, store

Array = npt.NDArray[np.float32]
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_HEADS = 4
"""Heads that meet a pool row while it is in registers."""
_MANY = 8
"""Tokens from which threads take whole tokens, below it some heads of one."""
_KEYS = 64
"""Pool rows that all heads of a task meet before the next ones."""


@compiled()
def _write_rows(projected, slots, norm, eps, pool):
    """pool[slot] = [c / rms(c) * norm, r] from the last columns of ``projected``."""
    rank, width = norm.size, pool.shape[2]
    for t in range(slots.size):
        if slots[t] > 0:
            source = (t + 1) * projected.shape[1] - width
            target = slots[t] * width
            total = vset(_ZERO)
            for c in range(0, rank, LANES):
                x = load(projected, source + c, rank - c)
                total = vfma(x, x, total)
            factor = vset(_ONE / np.sqrt(vsum(total) / np.float32(rank) + eps))
            for c in range(0, rank, LANES):
                x = vmul(load(projected, source + c, rank - c), factor)
                store(pool, target + c, vmul(x, load(norm, c, rank - c)), rank - c)
            copy(projected, source + rank, pool, target + rank, width - rank)


@compiled()
def _scores(query, place, width, pool, places, begin, end, scores):
    """scores[h, j] = query[h] . pool[places[j]]: four heads at flat ``place``, two keys at a time.

    An odd last key is computed twice.
    """
    p1 = place + width
    p2 = p1 + width
    p3 = p2 + width
    for j in range(begin, end, 2):
        i = min(j + 1, end - 1)
        key, other = places[j], places[i]
        a0, a1, a2, a3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        b0, b1, b2, b3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        for c in range(0, width, LANES):
            count = width - c
            x, y = load(pool, key + c, count), load(pool, other + c, count)
            q = load(query, place + c, count)
            a0, b0 = vfma(q, x, a0), vfma(q, y, b0)
            q = load(query, p1 + c, count)
            a1, b1 = vfma(q, x, a1), vfma(q, y, b1)
            q = load(query, p2 + c, count)
            a2, b2 = vfma(q, x, a2), vfma(q, y, b2)
            q = load(query, p3 + c, count)
            a3, b3 = vfma(q, x, a3), vfma(q, y, b3)
        scores[0, j], scores[0, i] = vsum(a0), vsum(b0)
        scores[1, j], scores[1, i] = vsum(a1), vsum(b1)
        scores[2, j], scores[2, i] = vsum(a2), vsum(b2)
        scores[3, j], scores[3, i] = vsum(a3), vsum(b3)


@compiled()
def _softmax(scores, length):
    """scores <- exp(scores - max) / their sum, for one head."""
    most = np.float32(-np.inf)
    for j in range(length):
        most = max(most, scores[j])
    for j in range(length):
        scores[j] = exp32(scores[j] - most)
    total = _ZERO
    for j in range(length):
        total += scores[j]
    factor = _ONE / total
    for j in range(length):
        scores[j] *= factor


@compiled()
def _weigh(scores, weight, pool, places, length, c, rank, context, place):
    """Numbers c .. c + 32 of context[h] = sum_j scores[h, j] pool[places[j]], for four heads.

    weight, place: where the first head's scores and context stand, flat.
    """
    w1 = weight + length
    w2 = w1 + length
    w3 = w2 + length
    d = c + LANES
    a0, a1, a2, a3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    b0, b1, b2, b3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    for j in range(length):
        row = places[j]
        x, y = load(pool, row + c, rank - c), load(pool, row + d, rank - d)
        w = vset(at(scores, weight + j))
        a0, b0 = vfma(w, x, a0), vfma(w, y, b0)
        w = vset(at(scores, w1 + j))
        a1, b1 = vfma(w, x, a1), vfma(w, y, b1)
        w = vset(at(scores, w2 + j))
        a2, b2 = vfma(w, x, a2), vfma(w, y, b2)
        w = vset(at(scores, w3 + j))
        a3, b3 = vfma(w, x, a3), vfma(w, y, b3)
    p1 = place + rank
    p2 = p1 + rank
    p3 = p2 + rank
    store(context, place + c, a0, rank - c)
    store(context, p1 + c, a1, rank - c)
    store(context, p2 + c, a2, rank - c)
    store(context, p3 + c, a3, rank - c)
    store(context, place + d, b0, rank - d)
    store(context, p1 + d, b1, rank - d)
    store(context, p2 + d, b2, rank - d)
    store(context, p3 + d, b3, rank - d)


@compiled()
def _decode_task(
    i, first, last, query, rows, begin_at, lengths, tail_offsets, tail_columns, kv_table, pool,
    context,
):  # fmt: skip
    """Heads first .. last of one token; pool rows stay in a near cache from head to head."""
    heads, width, rank = query.shape[1], query.shape[2], context.shape[2]
    run, tail = lengths[i] - begin_at, tail_offsets[i]
    length = run + tail_offsets[i + 1] - tail
    places = np.empty(length, np.int64)
    for j in range(run):
        places[j] = np.int64(kv_table[rows[i], begin_at + j]) * width
    for j in range(run, length):
        places[j] = np.int64(kv_table[rows[i], tail_columns[tail + j - run]]) * width
    scores = np.empty((last - first, length), np.float32)
    for begin in range(0, length, _KEYS):
        end = min(begin + _KEYS, length)
        for h in range(first, last, _HEADS):
            _scores(query, (i * heads + h) * width, width, pool, places, begin, end,
                    scores[h - first : h - first + _HEADS])  # fmt: skip
    for h in range(last - first):
        _softmax(scores[h], length)
    for c in range(0, rank, 2 * LANES):
        for h in range(first, last, _HEADS):
            _weigh(scores, (h - first) * length, pool, places, length, c, rank, context,
                   (i * heads + h) * rank)  # fmt: skip


@compiled()
def _decode_serial(
    query, rows, begin_at, lengths, tail_offsets, tail_columns, kv_table, pool, context
):
    """Query i ``[N, 4 n, E]`` of table row ``rows[i]``; what it sees: ``attention/queries.py``."""
    for i in range(rows.size):
        _decode_task(i, 0, query.shape[1], query, rows, begin_at, lengths, tail_offsets,
                     tail_columns, kv_table, pool, context)  # fmt: skip


@compiled(parallel=True)
def _decode_parallel(
    query, rows, begin_at, lengths, tail_offsets, tail_columns, kv_table, pool, context, span
):
    """``_decode_serial`` over all threads, ``span`` heads at a time."""
    heads = query.shape[1]
    spans = (heads + span - 1) // span
    for j in prange(rows.size * spans):
        task = np.int64(j)
        first = (task % spans) * span
        _decode_task(task // spans, first, min(first + span, heads), query, rows, begin_at,
                     lengths, tail_offsets, tail_columns, kv_table, pool, context)  # fmt: skip


def attend(
    projected: Array,
    weights: tuple[LatentWeights, Any],
    batch: RaggedQueries,
    pool: Array,
    wanted: WantedTokens | None = None,
    *,
    parallel_from: float,
) -> Array:
    """``reference.latent_attention``; short rows compiled, long ones by torch's products.

    weights: as given to the reference, and its norm as an array.
    """
    latent, norm = weights
    _write_rows(projected, batch.write_slots, norm, np.float32(latent.eps), pool)
    heads, dim = latent.num_heads, latent.query_dim
    q = torch.from_numpy(projected)[:, : heads * dim].unflatten(1, (heads, dim))
    if wanted is not None:
        q, batch = q[torch.from_numpy(wanted.index)], wanted.queries
    out = torch.empty(q.shape[0], heads, latent.values.shape[1])
    tokens = batch.short_tokens
    if len(tokens) == q.shape[0]:
        out = _decode(q, latent, batch, pool, parallel_from)
    elif len(tokens):
        index = torch.from_numpy(tokens)
        out[index] = _decode(q[index], latent, batch, pool, parallel_from)
    rows = torch.from_numpy(pool).squeeze(1)
    for i in batch.long_rows:
        piece, seen, start = batch.row(i)
        out[piece] = attend_row(q[piece], seen, start, rows, latent)
    return out.flatten(1).numpy()


def _decode(
    q: torch.Tensor, latent: LatentWeights, batch: RaggedQueries, pool: Array, parallel_from: float
) -> torch.Tensor:
    """The short tokens' queries ``[N, H, D]`` -> ``[N, H, V]``; heads are padded to whole tasks."""
    heads, width = latent.num_heads, pool.shape[2]
    padded = -(-heads // _HEADS) * _HEADS
    query = torch.zeros(q.shape[0], padded, width)
    query[:, :heads] = absorb(q, latent)
    context = torch.empty(q.shape[0], padded, latent.rank)
    work = (int(batch.short_lengths.sum()) + len(batch.tail_columns)) * heads * width
    arrays = (
        query.numpy(), batch.short_rows, batch.first, batch.short_lengths, batch.tail_offsets,
        batch.tail_columns, batch.kv_table, pool, context.numpy(),
    )  # fmt: skip
    if work > 4 * parallel_from:
        _decode_parallel(*arrays, padded if len(query) >= _MANY else _HEADS)
    else:
        _decode_serial(*arrays)
    return values_of(context[:, :heads], latent)

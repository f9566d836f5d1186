"""Compiled parts of gated attention: prepare q, k, v (norm, rotary, KV write), and decode.

Owns: the per-token work. Does not know: projections, who owns a slot.
Invariants: one query's result depends on its own row's slots only, summed in slot order by one
thread: it has the same bits in whatever batch it is computed.
Read next: ``reference.py`` (the readable twin; shapes are described there), ``queries.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np
from numba import prange

from hyradix.kernels.numba_support import compiled, exp32, sigmoid32
from hyradix.kernels.simd import LANES, at, put, vadd, vfma, vmul, vset, vsum
from hyradix.kernels.simd_rows import load, store

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled()
def _norm_rotate(source, s, target, t, dim, weight, eps, angles, angle, half):
    """target = rotary(source / rms(source) * weight) for one head; all places are flat.

    eps below 0: source is not normalised, only multiplied by the weight.
    """
    total = vset(_ZERO)
    for c in range(0, dim, LANES):
        x = load(source, s + c, dim - c)
        total = vfma(x, x, total)
    factor = _ONE
    if eps >= _ZERO:
        factor = _ONE / np.sqrt(vsum(total) / np.float32(dim) + eps)
    for c in range(half):
        x = at(source, s + c) * factor * weight[c]
        y = at(source, s + half + c) * factor * weight[half + c]
        cos, sin = at(angles, angle + c), at(angles, angle + half + c)
        put(target, t + c, x * cos - y * sin)
        put(target, t + half + c, y * cos + x * sin)
    for c in range(2 * half, dim):
        put(target, t + c, at(source, s + c) * factor * weight[c])


@compiled()
def _prepare_token(projected, t, position, slot, q_norm, k_norm, eps, angles, k_pool, v_pool, q):
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_pool.shape[1]
    half = angles.shape[2]
    angle = position * 2 * half
    source = t * projected.shape[1]
    for h in range(heads):
        _norm_rotate(projected, source + h * dim, q, (t * heads + h) * dim, dim, q_norm, eps,
                     angles, angle, half)  # fmt: skip
    if slot > 0:
        k0 = source + heads * dim
        v0 = k0 + kv_heads * dim
        target = slot * kv_heads * dim
        for h in range(kv_heads):
            _norm_rotate(projected, k0 + h * dim, k_pool, target + h * dim, dim, k_norm, eps,
                         angles, angle, half)  # fmt: skip
        for c in range(kv_heads * dim):
            put(v_pool, target + c, at(projected, v0 + c))


@compiled()
def prepare(projected, positions, slots, q_norm, k_norm, eps, angles, k_pool, v_pool, q):
    """Normalise and rotate q and k, write k and v to their slots; q: ``[T, H, D]``."""
    for t in range(positions.size):
        _prepare_token(projected, t, positions[t], slots[t], q_norm, k_norm, eps, angles, k_pool,
                       v_pool, q)  # fmt: skip


@compiled()
def prepare_queries(projected, positions, q_norm, eps, angles, q):
    """Normalise and rotate q, which stands first in each row of ``projected``; q: ``[T, H, D]``."""
    heads, dim, half = q.shape[1], q.shape[2], angles.shape[2]
    for t in range(positions.size):
        source, target, angle = t * projected.shape[1], t * heads * dim, positions[t] * 2 * half
        for h in range(heads):
            _norm_rotate(projected, source + h * dim, q, target + h * dim, dim, q_norm, eps,
                         angles, angle, half)  # fmt: skip


@compiled()
def _scores(q, query, keys, places, length, dim, scores):
    """scores[j] = q . keys[places[j]] for one query head; four keys at a time hide latency."""
    whole = length - length % 4
    for j in range(0, whole, 4):
        p0, p1, p2, p3 = places[j], places[j + 1], places[j + 2], places[j + 3]
        t0, t1, t2, t3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        for c in range(0, dim, LANES):
            count = dim - c
            x = load(q, query + c, count)
            t0 = vfma(x, load(keys, p0 + c, count), t0)
            t1 = vfma(x, load(keys, p1 + c, count), t1)
            t2 = vfma(x, load(keys, p2 + c, count), t2)
            t3 = vfma(x, load(keys, p3 + c, count), t3)
        scores[j], scores[j + 1] = vsum(t0), vsum(t1)
        scores[j + 2], scores[j + 3] = vsum(t2), vsum(t3)
    for j in range(whole, length):
        t0 = vset(_ZERO)
        for c in range(0, dim, LANES):
            count = dim - c
            t0 = vfma(load(q, query + c, count), load(keys, places[j] + c, count), t0)
        scores[j] = vsum(t0)


@compiled()
def _softmax(scores, length, scale):
    """scores <- exp(scale (scores - max)); returns their sum."""
    most = np.float32(-np.inf)
    for j in range(length):
        most = max(most, scores[j])
    for j in range(length):
        scores[j] = exp32((scores[j] - most) * scale)
    total = _ZERO
    for j in range(length):
        total += scores[j]
    return total


@compiled()
def _weigh(scores, values, places, length, dim, factor, out, place):
    """out[place:] = factor * sum_j scores[j] values[places[j]], two running sums."""
    by = vset(factor)
    for c in range(0, dim, LANES):
        count = dim - c
        even, odd = vset(_ZERO), vset(_ZERO)
        for j in range(0, length - 1, 2):
            even = vfma(vset(at(scores, j)), load(values, places[j] + c, count), even)
            odd = vfma(vset(at(scores, j + 1)), load(values, places[j + 1] + c, count), odd)
        if length % 2:
            last = length - 1
            even = vfma(vset(at(scores, last)), load(values, places[last] + c, count), even)
        total = vmul(vadd(even, odd), by)
        store(out, place + c, total, count)


@compiled()
def _decode_task(
    task, q, tokens, rows, first, lengths, tail_offsets, tail_columns, kv_table, k_pool, v_pool,
    projected, out,
):  # fmt: skip
    """One query token and one KV head: its group of query heads, gated."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    i, kv_head = task // kv_heads, task % kv_heads
    t, tail = tokens[i], tail_offsets[i]
    prefix = np.int64(lengths[i]) - first
    length = prefix + tail_offsets[i + 1] - tail
    slots = np.empty(length, np.int64)
    for j in range(prefix):
        slots[j] = (np.int64(kv_table[rows[i], first + j]) * kv_heads + kv_head) * dim
    for j in range(prefix, length):
        column = tail_columns[tail + j - prefix]
        slots[j] = (np.int64(kv_table[rows[i], column]) * kv_heads + kv_head) * dim
    scores = np.empty(length, np.float32)
    scale = _ONE / np.sqrt(np.float32(dim))
    gates = (t + 1) * projected.shape[1] - heads * dim
    for h in range(kv_head * group, (kv_head + 1) * group):
        place = (t * heads + h) * dim
        _scores(q, place, k_pool, slots, length, dim, scores)
        total = _softmax(scores, length, scale)
        _weigh(scores, v_pool, slots, length, dim, _ONE / total, out, place)
        if projected.size:
            for c in range(dim):
                gate = sigmoid32(at(projected, gates + h * dim + c))
                put(out, place + c, at(out, place + c) * gate)


@compiled()
def decode_serial(
    q, tokens, rows, first, lengths, tail_offsets, tail_columns, kv_table, k_pool, v_pool,
    projected, out,
):  # fmt: skip
    """Single queries: what token ``tokens[i]`` of table row ``rows[i]`` sees: ``RaggedQueries``.

    q: ``[T, H, D]``; out: ``[T, H D]``, gated by the last H D columns of ``projected``, if any.
    """
    for task in range(tokens.size * k_pool.shape[1]):
        _decode_task(task, q, tokens, rows, first, lengths, tail_offsets, tail_columns, kv_table,
                     k_pool, v_pool, projected, out)  # fmt: skip


@compiled(parallel=True)
def decode_parallel(
    q, tokens, rows, first, lengths, tail_offsets, tail_columns, kv_table, k_pool, v_pool,
    projected, out,
):  # fmt: skip
    """``decode_serial`` over all threads."""
    for i in prange(tokens.size * k_pool.shape[1]):
        task = np.int64(i)
        _decode_task(task, q, tokens, rows, first, lengths, tail_offsets, tail_columns, kv_table,
                     k_pool, v_pool, projected, out)  # fmt: skip

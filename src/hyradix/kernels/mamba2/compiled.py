"""The whole recurrent mixer of Mamba2 in compiled passes over a ragged batch.

Owns: convolution (by channels), the recurrence (by head), gate and norm (by token), in place by
state slot. Does not know: projections, batches, who owns a slot.

Invariants:
- Serial over the tokens of one (sequence, head): the bits of outputs and states do not depend on
  how a sequence is split into calls, nor on its neighbours.
- A save is a plain copy of the working state at that depth.
- Arrays are C-contiguous and addressed flat (``simd.py``); ``reference.py`` is the readable twin
  and describes the shapes.
Read next: ``reference.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import math

import numpy as np
from numba import prange

from hyradix.kernels.numba_support import compiled, silu32
from hyradix.kernels.simd import LANES, at, vadd, vfma, vload, vmul, vset, vstore, vsum
from hyradix.kernels.simd_rows import copy, load, store

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LINEAR_FROM = np.float32(20.0)
"""Above this softplus(x) is x in float32 (torch's threshold)."""
FOUR = 4
"""Tokens that pass over the state together in a prefill."""
CHANNELS = 256
"""Channels that one thread convolves at a time."""


@compiled()
def _move_window(projected, first, count, conv_state, base, target, c, size):
    """Window after ``count`` tokens, channels c : c + size, to flat ``target``; it was at ``base``.

    Rows are moved oldest first: a window may be moved onto itself.
    """
    kept, row = conv_state.shape[1], conv_state.shape[2]
    for j in range(kept):
        t = count - kept + j  # the column of this token; negative: from the old window
        place = target + j * row + c
        if t < 0:
            copy(conv_state, base + (t + kept) * row + c, conv_state, place, size)
        else:
            copy(projected, (first + t) * projected.shape[1] + c, conv_state, place, size)


@compiled()
def _convolve(
    projected, first, last, slot, conv_weight, conv_bias, conv_state, save_at, save_slots, save,
    save_last, c, size, mixed,
):  # fmt: skip
    """Channels c : c + size of one sequence: mixed = silu(convolution); windows of slot, saves."""
    width, row = conv_weight.shape[0], conv_state.shape[2]
    kept, stride = width - 1, projected.shape[1]
    base = slot * kept * row
    for t in range(first, last):
        for lane in range(c, c + size, LANES):
            count = c + size - lane
            total = load(conv_bias, lane, count)
            for j in range(width):
                tap = load(conv_weight, j * row + lane, count)
                source = t - kept + j
                if source >= first:
                    total = vfma(load(projected, source * stride + lane, count), tap, total)
                else:
                    old = base + (source - first + kept) * row + lane
                    total = vfma(load(conv_state, old, count), tap, total)
            store(mixed, t * row + lane, total, count)
        values = mixed[t, c : c + size]
        for i in range(size):
            values[i] = silu32(values[i])
    for s in range(save, save_last):
        _move_window(projected, first, save_at[s], conv_state, base, save_slots[s] * kept * row, c,
                     size)  # fmt: skip
    if last > first:
        _move_window(projected, first, last - first, conv_state, base, base, c, size)


@compiled(inline=True)
def _lanes(state, s, count, keep, k, u, q, total):
    """Sixteen columns of one row: S <- keep S + k u, stored; returns total + S q."""
    value = vfma(k, u, vmul(keep, load(state, s, count)))
    store(state, s, value, count)
    return vfma(value, q, total)


@compiled()
def _step(state, base, mixed, q, k, v, decay, dt, skip, dk, dv, out, place):
    """S <- decay S + k (dt v)^T; out = S^T q + skip v. S is [dk, dv] at flat ``base``.

    Four times sixteen columns at a time where there are so many: whole lines of memory.
    """
    keep, rate, through = vset(decay), vset(dt), vset(skip)
    c = 0
    while c + 4 * LANES <= dv:
        x0, x1 = vload(mixed, v + c), vload(mixed, v + c + LANES)
        x2, x3 = vload(mixed, v + c + 2 * LANES), vload(mixed, v + c + 3 * LANES)
        u0, u1, u2, u3 = vmul(rate, x0), vmul(rate, x1), vmul(rate, x2), vmul(rate, x3)
        t0, t1, t2, t3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        for i in range(dk):
            s = base + i * dv + c
            b, r = vset(at(mixed, k + i)), vset(at(mixed, q + i))
            t0 = _lanes(state, s, LANES, keep, b, u0, r, t0)
            t1 = _lanes(state, s + LANES, LANES, keep, b, u1, r, t1)
            t2 = _lanes(state, s + 2 * LANES, LANES, keep, b, u2, r, t2)
            t3 = _lanes(state, s + 3 * LANES, LANES, keep, b, u3, r, t3)
        vstore(out, place + c, vfma(through, x0, t0))
        vstore(out, place + c + LANES, vfma(through, x1, t1))
        vstore(out, place + c + 2 * LANES, vfma(through, x2, t2))
        vstore(out, place + c + 3 * LANES, vfma(through, x3, t3))
        c += 4 * LANES
    while c < dv:
        count = dv - c
        x = load(mixed, v + c, count)
        u, total = vmul(rate, x), vset(_ZERO)
        for i in range(dk):
            b, r = vset(at(mixed, k + i)), vset(at(mixed, q + i))
            total = _lanes(state, base + i * dv + c, count, keep, b, u, r, total)
        store(out, place + c, vfma(through, x, total), count)
        c += LANES


@compiled(inline=True)
def _pass(value, mixed, i, row, q, k, keep, u, total):
    """One token over sixteen columns of row i of S: S afterwards, and total + S q."""
    value = vfma(vset(at(mixed, row + k + i)), u, vmul(keep, value))
    return value, vfma(value, vset(at(mixed, row + q + i)), total)


@compiled()
def _step_four(state, base, mixed, row, q, k, v, decay, dt, skip, dk, dv, out, place):
    """``_step`` for four tokens, S being read and written once; the same bits.

    row, place: of the first token in ``mixed`` and ``out``. decay, dt: of the four.
    """
    width, stride, through = mixed.shape[1], out.shape[1], vset(skip)
    r1, r2, r3 = row + width, row + 2 * width, row + 3 * width
    d0, d1, d2, d3 = vset(decay[0]), vset(decay[1]), vset(decay[2]), vset(decay[3])
    for c in range(0, dv, LANES):
        count = dv - c
        x0, x1 = load(mixed, row + v + c, count), load(mixed, r1 + v + c, count)
        x2, x3 = load(mixed, r2 + v + c, count), load(mixed, r3 + v + c, count)
        u0, u1 = vmul(vset(dt[0]), x0), vmul(vset(dt[1]), x1)
        u2, u3 = vmul(vset(dt[2]), x2), vmul(vset(dt[3]), x3)
        t0, t1, t2, t3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        for i in range(dk):
            s = base + i * dv + c
            value, t0 = _pass(load(state, s, count), mixed, i, row, q, k, d0, u0, t0)
            value, t1 = _pass(value, mixed, i, r1, q, k, d1, u1, t1)
            value, t2 = _pass(value, mixed, i, r2, q, k, d2, u2, t2)
            value, t3 = _pass(value, mixed, i, r3, q, k, d3, u3, t3)
            store(state, s, value, count)
        store(out, place + c, vfma(through, x0, t0), count)
        store(out, place + stride + c, vfma(through, x1, t1), count)
        store(out, place + 2 * stride + c, vfma(through, x2, t2), count)
        store(out, place + 3 * stride + c, vfma(through, x3, t3), count)


@compiled()
def _time_step(x, low, high):
    """softplus between limits; NaN stays."""
    dt = x if x > _LINEAR_FROM else np.float32(math.log1p(math.exp(x)))
    if dt < low:
        dt = low
    if dt > high:
        dt = high
    return dt


@compiled()
def _run_head(
    projected, first, last, slot, head, num_k_heads, decay_rate, dt_bias, dt_low, dt_high, skip,
    state, save_at, save_slots, save, save_last, mixed, out,
):  # fmt: skip
    """All tokens of one sequence for one head, four at a time up to the next save."""
    num_v_heads, dk, dv = state.shape[1:]
    group, channels = head // (num_v_heads // num_k_heads), mixed.shape[1]
    q, k = group * dk, (num_k_heads + group) * dk
    v = 2 * num_k_heads * dk + head * dv
    dt_column, size = channels + num_v_heads * dv + head, dk * dv
    base = (slot * num_v_heads + head) * size
    dt, decay = np.empty(FOUR, np.float32), np.empty(FOUR, np.float32)
    t = first
    while t < last:
        until = first + save_at[save] if save < save_last else last
        count = FOUR if t + FOUR <= until else 1
        for n in range(count):
            dt[n] = _time_step(projected[t + n, dt_column] + dt_bias[head], dt_low, dt_high)
            decay[n] = np.float32(math.exp(decay_rate[head] * dt[n]))
        row, place = t * channels, t * out.shape[1] + head * dv
        if count == FOUR:
            _step_four(state, base, mixed, row, q, k, v, decay, dt, skip[head], dk, dv, out, place)
        else:
            _step(state, base, mixed, row + q, row + k, row + v, decay[0], dt[0], skip[head], dk,
                  dv, out, place)  # fmt: skip
        t += count
        while save < save_last and save_at[save] == t - first:
            target = (np.int64(save_slots[save]) * num_v_heads + head) * size
            copy(state, base, state, target, size)
            save += 1


@compiled()
def _gate_norm(projected, t, z, norm, num_groups, eps, out):
    """out[t] = norm by groups of (out[t] * silu(z of token t)); z is its first column."""
    size = out.shape[1] // num_groups
    values, gates = out[t], projected[t, z : z + out.shape[1]]
    for c in range(values.size):
        values[c] *= silu32(gates[c])
    for group in range(num_groups):
        place = t * out.shape[1] + group * size
        even, odd = vset(_ZERO), vset(_ZERO)
        for c in range(0, size, 2 * LANES):
            x = load(out, place + c, size - c)
            even = vfma(x, x, even)
            if c + LANES < size:
                x = load(out, place + c + LANES, size - c - LANES)
                odd = vfma(x, x, odd)
        total = vsum(vadd(even, odd))
        factor = vset(_ONE / np.sqrt(total / np.float32(size) + eps))
        for c in range(0, size, LANES):
            count = size - c
            scaled = vmul(vmul(load(out, place + c, count), factor),
                          load(norm, group * size + c, count))  # fmt: skip
            store(out, place + c, scaled, count)


@compiled()
def mix_serial(
    projected, cu_seqlens, slots, num_k_heads, conv_weight, conv_bias, conv_state, decay_rate,
    dt_bias, dt_low, dt_high, skip, norm, num_groups, eps, state, save_offsets, save_at,
    save_slots, mixed, out,
):  # fmt: skip
    """``reference.mix`` on one thread. conv_weight: [K, C]; mixed: [T, C] is overwritten."""
    channels, num_heads = conv_weight.shape[1], state.shape[1]
    for i in range(slots.size):
        first, last, save, save_last = (
            cu_seqlens[i], cu_seqlens[i + 1], save_offsets[i], save_offsets[i + 1]
        )  # fmt: skip
        _convolve(projected, first, last, slots[i], conv_weight, conv_bias, conv_state, save_at,
                  save_slots, save, save_last, 0, channels, mixed)  # fmt: skip
        for head in range(num_heads):
            _run_head(projected, first, last, slots[i], head, num_k_heads, decay_rate, dt_bias,
                      dt_low, dt_high, skip, state, save_at, save_slots, save, save_last, mixed,
                      out)  # fmt: skip
    for t in range(cu_seqlens[slots.size]):
        _gate_norm(projected, t, channels, norm, num_groups, eps, out)


@compiled(parallel=True)
def mix_parallel(
    projected, cu_seqlens, slots, num_k_heads, conv_weight, conv_bias, conv_state, decay_rate,
    dt_bias, dt_low, dt_high, skip, norm, num_groups, eps, state, save_offsets, save_at,
    save_slots, mixed, out,
):  # fmt: skip
    """``mix_serial`` over all threads."""
    channels, num_heads = conv_weight.shape[1], state.shape[1]
    num_blocks = (channels + CHANNELS - 1) // CHANNELS
    for task in prange(slots.size * num_blocks):
        i, c = np.int64(task) // num_blocks, (np.int64(task) % num_blocks) * CHANNELS
        size = min(CHANNELS, channels - c)
        _convolve(projected, cu_seqlens[i], cu_seqlens[i + 1], slots[i], conv_weight, conv_bias,
                  conv_state, save_at, save_slots, save_offsets[i], save_offsets[i + 1], c, size,
                  mixed)  # fmt: skip
    for task in prange(slots.size * num_heads):
        i, head = np.int64(task) // num_heads, np.int64(task) % num_heads
        _run_head(projected, cu_seqlens[i], cu_seqlens[i + 1], slots[i], head, num_k_heads,
                  decay_rate, dt_bias, dt_low, dt_high, skip, state, save_at, save_slots,
                  save_offsets[i], save_offsets[i + 1], mixed, out)  # fmt: skip
    for t in prange(cu_seqlens[slots.size]):
        _gate_norm(projected, np.int64(t), channels, norm, num_groups, eps, out)

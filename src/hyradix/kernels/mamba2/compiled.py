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


@compiled()
def _run_head(
    projected, first, last, slot, head, num_k_heads, decay_rate, dt_bias, dt_low, dt_high, skip,
    state, save_at, save_slots, save, save_last, mixed, out,
):  # fmt: skip
    """All tokens of one sequence for one head."""
    num_v_heads, dk, dv = state.shape[1:]
    group = head // (num_v_heads // num_k_heads)
    channels = mixed.shape[1]
    q, k = group * dk, (num_k_heads + group) * dk
    v = 2 * num_k_heads * dk + head * dv
    dt_column = channels + num_v_heads * dv + head
    size = dk * dv
    base = (slot * num_v_heads + head) * size
    for t in range(first, last):
        x = projected[t, dt_column] + dt_bias[head]
        dt = x if x > _LINEAR_FROM else np.float32(math.log1p(math.exp(x)))
        if dt < dt_low:
            dt = dt_low
        if dt > dt_high:
            dt = dt_high
        decay = np.float32(math.exp(decay_rate[head] * dt))
        row = t * channels
        _step(state, base, mixed, row + q, row + k, row + v, decay, dt, skip[head], dk, dv, out,
              t * out.shape[1] + head * dv)  # fmt: skip
        while save < save_last and save_at[save] == t - first + 1:
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

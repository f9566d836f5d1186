"""The whole recurrent mixer of Kimi delta attention in one compiled pass over a ragged batch.

Owns: convolution, decay by channel, q/k norms, delta rule, gated output norm, in place by state
slot. Does not know: projections, batches, who owns a slot.

Invariants:
- Serial over the tokens of one (sequence, head): the bits of outputs and states do not depend on
  how a sequence is split into calls, nor on its neighbours.
- A save is a plain copy of the working state at that depth.
- Arrays are C-contiguous and addressed flat (``simd.py``); ``reference.py`` is the readable twin
  and describes the shapes.
Read next: ``reference.py``, ``../causal_conv/compiled.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np
from numba import prange

from hyradix.kernels.causal_conv.compiled import convolve, window_in, window_out
from hyradix.kernels.numba_support import compiled, exp32, sigmoid32
from hyradix.kernels.simd import LANES, at, vadd, vfma, vmul, vset, vsum
from hyradix.kernels.simd_rows import copy, load, store

_L2_EPS = np.float32(1e-6)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ODD = tuple(np.float32(1.0 / n) for n in (3, 5, 7, 9, 11, 13, 15))


@compiled(inline=True)
def softplus32(x):
    """float32 log(1 + e^x) within 1e-6 of it above -87, in operations that vectorise. NaN stays.

    max(x, 0) + log1p(y) with y = e^-|x|, and log1p(y) = 2 atanh(y / (2 + y)) as a series.
    """
    y = exp32(-abs(x))
    z = y / (_TWO + y)
    w = z * z
    p = _ODD[6] * w + _ODD[5]
    p = p * w + _ODD[4]
    p = p * w + _ODD[3]
    p = p * w + _ODD[2]
    p = p * w + _ODD[1]
    p = p * w + _ODD[0]
    return (x if x > _ZERO else _ZERO) + _TWO * z * (_ONE + w * p)


@compiled()
def _sum_of_squares(array, start, size):
    total = vset(_ZERO)
    for c in range(0, size, LANES):
        value = load(array, start + c, size - c)
        total = vfma(value, value, total)
    return vsum(total)


@compiled()
def _scale(array, start, size, factor):
    by = vset(factor)
    for c in range(0, size, LANES):
        store(array, start + c, vmul(load(array, start + c, size - c), by), size - c)


@compiled()
def _decays(forget, place, bias, b, rate, lower_bound, decay, dk):
    """decay[i] = e^g of one head and token; lower_bound 0 stands for none."""
    if lower_bound < _ZERO:
        for i in range(dk):
            decay[i] = lower_bound * sigmoid32(rate * (at(forget, place + i) + at(bias, b + i)))
    else:
        for i in range(dk):
            decay[i] = -rate * softplus32(at(forget, place + i) + at(bias, b + i))
    for i in range(dk):
        decay[i] = exp32(decay[i])


@compiled()
def _delta(state, base, mixed, decay, faded, beta, dk, dv, out):
    """S <- D S + k u^T with u = beta (v - (D S)^T k), D = diag(decay); out = S^T q.

    S is [dk, dv] at flat ``base``; q, k, v stand one after the other in ``mixed``. faded: room for
    dk. Sixteen columns at a time, their sums in registers.
    """
    k, v = dk, 2 * dk
    for i in range(dk):
        faded[i] = decay[i] * mixed[k + i]
    rate, minus = vset(beta), vset(-_ONE)
    for c in range(0, dv, LANES):
        count = dv - c
        m0, m1 = vset(_ZERO), vset(_ZERO)
        for i in range(0, dk - 1, 2):
            s = base + i * dv + c
            m0 = vfma(load(state, s, count), vset(at(faded, i)), m0)
            m1 = vfma(load(state, s + dv, count), vset(at(faded, i + 1)), m1)
        if dk % 2:
            s = base + (dk - 1) * dv + c
            m0 = vfma(load(state, s, count), vset(at(faded, dk - 1)), m0)
        u = vmul(rate, vfma(minus, vadd(m0, m1), load(mixed, v + c, count)))
        total = vset(_ZERO)
        for i in range(dk):
            s = base + i * dv + c
            kept = vmul(vset(at(decay, i)), load(state, s, count))
            value = vfma(vset(at(mixed, k + i)), u, kept)
            store(state, s, value, count)
            total = vfma(value, vset(at(mixed, i)), total)
        store(out, c, total, count)


@compiled()
def _gate_norm(o, dv, gates, z, gate, weight, eps, out):
    """out[z:] = o / rms(o) * weight * sigmoid(gates[z:]); gate: room for dv."""
    factor = _ONE / np.sqrt(_sum_of_squares(o, 0, dv) / np.float32(dv) + eps)
    for c in range(dv):
        gate[c] = sigmoid32(at(gates, z + c))
    for c in range(0, dv, LANES):
        count = dv - c
        normed = vmul(vmul(load(o, c, count), vset(factor)), load(weight, c, count))
        store(out, z + c, vmul(normed, load(gate, c, count)), count)


@compiled()
def _run_head(
    projected, forget, gates, first, last, slot, head, conv_weight, conv_state, state, rate,
    dt_bias, norm_weight, eps, lower_bound, save_at, save_slots, save, save_last, out,
):  # fmt: skip
    """All tokens of one sequence for one head."""
    heads, dk, dv = state.shape[1:]
    width, channels = conv_weight.shape[1], conv_weight.shape[2]
    b0 = heads * channels
    segments = np.empty((3, 2), np.int64)
    segments[0, 0], segments[0, 1] = head * dk, dk
    segments[1, 0], segments[1, 1] = (heads + head) * dk, dk
    segments[2, 0], segments[2, 1] = 2 * heads * dk + head * dv, dv
    window = np.empty(width * channels, np.float32)
    mixed = np.empty(channels, np.float32)
    decay, faded = np.empty(dk, np.float32), np.empty(dk, np.float32)
    o, gate = np.empty(dv, np.float32), np.empty(dv, np.float32)
    row = conv_state.shape[2]
    conv_size = conv_state.shape[1] * row
    size = dk * dv
    base = (slot * heads + head) * size
    window_in(window, width, channels, conv_state, slot * conv_size, row, segments)
    newest = width - 1
    for t in range(first, last):
        token = t * projected.shape[1]
        convolve(projected, token, window, newest, width, channels, conv_weight,
                 head * width * channels, mixed, segments)  # fmt: skip
        factor = _ONE / np.sqrt(_sum_of_squares(mixed, 0, dk) + _L2_EPS)
        _scale(mixed, 0, dk, factor / np.sqrt(np.float32(dk)))
        _scale(mixed, dk, dk, _ONE / np.sqrt(_sum_of_squares(mixed, dk, dk) + _L2_EPS))
        _decays(forget, (t * heads + head) * dk, dt_bias, head * dk, rate[head], lower_bound,
                decay, dk)  # fmt: skip
        beta = sigmoid32(at(projected, token + b0 + head))
        _delta(state, base, mixed, decay, faded, beta, dk, dv, o)
        _gate_norm(o, dv, gates, (t * heads + head) * dv, gate, norm_weight, eps, out)
        while save < save_last and save_at[save] == t - first + 1:
            target = save_slots[save]
            copy(state, base, state, (target * heads + head) * size, size)
            window_out(window, newest, width, channels, conv_state, target * conv_size, row,
                       segments)  # fmt: skip
            save += 1
        newest = (newest + 1) % width
    if last > first:
        newest = (newest + width - 1) % width
        window_out(window, newest, width, channels, conv_state, slot * conv_size, row, segments)


@compiled()
def mix_serial(
    projected, forget, gates, cu_seqlens, state_slots, conv_weight, conv_state, state, rate,
    dt_bias, norm_weight, eps, lower_bound, save_offsets, save_at, save_slots, out,
):  # fmt: skip
    """``reference.mix`` on one thread; conv_weight is [H, K, channels of one head]."""
    heads = state.shape[1]
    for task in range(state_slots.size * heads):
        i = task // heads
        _run_head(projected, forget, gates, cu_seqlens[i], cu_seqlens[i + 1], state_slots[i],
                  task % heads, conv_weight, conv_state, state, rate, dt_bias, norm_weight, eps,
                  lower_bound, save_at, save_slots, save_offsets[i], save_offsets[i + 1],
                  out)  # fmt: skip


@compiled(parallel=True)
def mix_parallel(
    projected, forget, gates, cu_seqlens, state_slots, conv_weight, conv_state, state, rate,
    dt_bias, norm_weight, eps, lower_bound, save_offsets, save_at, save_slots, out,
):  # fmt: skip
    """``mix_serial`` over all threads (another name: numba's cache tells functions by name)."""
    heads = state.shape[1]
    for j in prange(state_slots.size * heads):
        task = np.int64(j)  # signed, as in the serial form: one compilation serves both
        i = task // heads
        _run_head(projected, forget, gates, cu_seqlens[i], cu_seqlens[i + 1], state_slots[i],
                  task % heads, conv_weight, conv_state, state, rate, dt_bias, norm_weight, eps,
                  lower_bound, save_at, save_slots, save_offsets[i], save_offsets[i + 1],
                  out)  # fmt: skip

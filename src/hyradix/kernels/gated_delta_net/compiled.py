"""The whole recurrent mixer of a gated delta net in one compiled pass over a ragged batch.

Owns: convolution, gates, q/k norms, delta rule, gated output norm, in place by state slot.
Does not know: projections, batches, who owns a slot.

Invariants:
- Serial over the tokens of one (sequence, key head): the bits of outputs and states do not depend
  on how a sequence is split into calls, nor on its neighbours.
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

from hyradix.kernels.numba_support import compiled, sigmoid32, silu32
from hyradix.kernels.simd import LANES, at, put, vfma, vmul, vset
from hyradix.kernels.simd_rows import copy, dot, load, scale, store
from hyradix.kernels.tree_recurrence.step import head_decay, step_head

_L2_EPS = np.float32(1e-6)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LINEAR_FROM = np.float32(20.0)
"""Above this softplus(x) is x in float32 (torch's threshold)."""


@compiled()
def segments_of(group, num_k_heads, ratio, dk, dv):
    """Where a group's q, k and v stand among all channels: [3, (start, count)]."""
    segments = np.empty((3, 2), np.int64)
    segments[0, 0], segments[0, 1] = group * dk, dk
    segments[1, 0], segments[1, 1] = (num_k_heads + group) * dk, dk
    segments[2, 0], segments[2, 1] = (2 * num_k_heads * dk) + group * ratio * dv, ratio * dv
    return segments


@compiled()
def _window_out(window, newest, width, channels, conv_state, base, stride, segments):
    """Ring [K, channels] -> pool rows [K-1, C] at flat ``base``, oldest first."""
    for j in range(width - 1):
        source = ((newest + 2 + j) % width) * channels
        for segment in range(3):
            start, count = segments[segment, 0], segments[segment, 1]
            copy(window, source, conv_state, base + j * stride + start, count)
            source += count


@compiled()
def _window_in(window, width, channels, conv_state, base, stride, segments):
    """Pool rows [K-1, C] -> ring rows 0..K-2; row K-1 is where the newest goes."""
    for j in range(width - 1):
        target = j * channels
        for segment in range(3):
            start, count = segments[segment, 0], segments[segment, 1]
            copy(conv_state, base + j * stride + start, window, target, count)
            target += count


@compiled()
def _convolve(projected, token, window, newest, width, channels, weight, w, mixed, segments):
    """Take one token's raw columns into the ring; mixed = silu(convolution)."""
    target = newest * channels
    for segment in range(3):
        start, count = segments[segment, 0], segments[segment, 1]
        copy(projected, token + start, window, target, count)
        target += count
    for c in range(0, channels, LANES):
        count = channels - c
        total = vset(_ZERO)
        for j in range(width):
            row = ((newest + 1 + j) % width) * channels
            tap = load(weight, w + j * channels + c, count)
            total = vfma(load(window, row + c, count), tap, total)
        store(mixed, c, total, count)
    silu_row(mixed, 0, channels)


@compiled()
def silu_row(values, start, size):
    """values[start : start + size] = silu of them."""
    for c in range(size):  # flat places: an index that might be negative does not vectorise
        put(values, start + c, silu32(at(values, start + c)))


@compiled()
def unit_keys(mixed, place, dk):
    """q and k of one key head, at ``place``: both to length 1, q scaled."""
    factor = _ONE / np.sqrt(dot(mixed, place, mixed, place, dk) + _L2_EPS)
    scale(mixed, place, dk, factor / np.sqrt(np.float32(dk)))
    k = place + dk
    scale(mixed, k, dk, _ONE / np.sqrt(dot(mixed, k, mixed, k, dk) + _L2_EPS))


@compiled()
def log_decay(a, rate):
    """g = rate * softplus(a)."""
    return rate * (a if a > _LINEAR_FROM else np.float32(math.log1p(math.exp(a))))


@compiled()
def gate_norm(o, start, dv, projected, z, gate, weight, eps, out, place):
    """out[place:] = o[start:] / rms * weight * silu(projected[z:]), ``dv`` elements."""
    factor = _ONE / np.sqrt(dot(o, start, o, start, dv) / np.float32(dv) + eps)
    copy(projected, z, gate, 0, dv)
    silu_row(gate, 0, dv)
    for c in range(0, dv, LANES):
        count = dv - c
        normed = vmul(vmul(load(o, start + c, count), vset(factor)), load(weight, c, count))
        store(out, place + c, vmul(normed, load(gate, c, count)), count)


@compiled()
def _save(state, conv_state, slot, target, group, size, window, newest, width, channels, segments):
    """Copy the working state of one group of heads, and its window, to slot ``target``."""
    num_v_heads = state.shape[1]
    stride = num_v_heads * state.shape[2] * state.shape[3]
    copy(state, slot * stride + group * size, state, target * stride + group * size, size)
    row = conv_state.shape[2]
    base = target * conv_state.shape[1] * row
    _window_out(window, newest, width, channels, conv_state, base, row, segments)


@compiled()
def _run_group(
    projected, first, last, slot, group, num_k_heads, conv_weight, conv_state, state, decay_rate,
    dt_bias, norm_weight, eps, save_at, save_slots, save, save_last, out,
):  # fmt: skip
    """All tokens of one sequence for one key head and its value heads."""
    num_v_heads, dk, dv = state.shape[1:]
    ratio = num_v_heads // num_k_heads
    value_dim = num_v_heads * dv
    z0 = 2 * num_k_heads * dk + value_dim
    b0 = z0 + value_dim
    a0 = b0 + num_v_heads
    width, channels = conv_weight.shape[1], conv_weight.shape[2]
    segments = segments_of(group, num_k_heads, ratio, dk, dv)
    window = np.empty(width * channels, np.float32)
    mixed = np.empty(channels, np.float32)
    o, gate = np.empty(dv, np.float32), np.empty(dv, np.float32)
    row = conv_state.shape[2]
    conv_base = slot * conv_state.shape[1] * row
    _window_in(window, width, channels, conv_state, conv_base, row, segments)
    newest = width - 1
    for t in range(first, last):
        token = t * projected.shape[1]
        _convolve(projected, token, window, newest, width, channels, conv_weight,
                  group * width * channels, mixed, segments)  # fmt: skip
        unit_keys(mixed, 0, dk)
        for r in range(ratio):
            head = group * ratio + r
            g = log_decay(at(projected, token + a0 + head) + dt_bias[head], decay_rate[head])
            beta = sigmoid32(at(projected, token + b0 + head))
            base = (slot * num_v_heads + head) * dk * dv
            step_head(state, base, state, base, mixed, 0, dk, 2 * dk + r * dv, head_decay(g),
                      beta, dk, dv, True, o, 0)  # fmt: skip
            gate_norm(o, 0, dv, projected, token + z0 + head * dv, gate, norm_weight, eps, out,
                      t * value_dim + head * dv)  # fmt: skip
        while save < save_last and save_at[save] == t - first + 1:
            _save(state, conv_state, slot, save_slots[save], group, ratio * dk * dv, window,
                  newest, width, channels, segments)  # fmt: skip
            save += 1
        newest = (newest + 1) % width
    if last > first:
        newest = (newest + width - 1) % width
        _window_out(window, newest, width, channels, conv_state, conv_base, row, segments)


@compiled()
def mix_serial(
    projected, cu_seqlens, state_slots, num_k_heads, conv_weight, conv_state, state, decay_rate,
    dt_bias, norm_weight, eps, save_offsets, save_at, save_slots, out,
):  # fmt: skip
    """``reference.mix`` on one thread; conv_weight is [Hk, K, channels of one group]."""
    for task in range(state_slots.size * num_k_heads):
        row = task // num_k_heads
        _run_group(projected, cu_seqlens[row], cu_seqlens[row + 1], state_slots[row],
                   task % num_k_heads, num_k_heads, conv_weight, conv_state, state, decay_rate,
                   dt_bias, norm_weight, eps, save_at, save_slots, save_offsets[row],
                   save_offsets[row + 1], out)  # fmt: skip


@compiled(parallel=True)
def mix_parallel(
    projected, cu_seqlens, state_slots, num_k_heads, conv_weight, conv_state, state, decay_rate,
    dt_bias, norm_weight, eps, save_offsets, save_at, save_slots, out,
):  # fmt: skip
    """``mix_serial`` over all threads (another name: numba's cache tells functions by name)."""
    for i in prange(state_slots.size * num_k_heads):
        task = np.int64(i)  # signed, as in the serial form: one compilation serves both
        row = task // num_k_heads
        _run_group(projected, cu_seqlens[row], cu_seqlens[row + 1], state_slots[row],
                   task % num_k_heads, num_k_heads, conv_weight, conv_state, state, decay_rate,
                   dt_bias, norm_weight, eps, save_at, save_slots, save_offsets[row],
                   save_offsets[row + 1], out)  # fmt: skip

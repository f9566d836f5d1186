"""What is kept of judged drafts, compiled: one call for all layers and all requests.

Owns: how tasks (layer, movement, head) are cut. Does not know: requests, acceptance.
Invariants: those of ``keeping.py``, the readable twin; a task writes its own head's state, and the
task of head 0 the layer's window, oldest column first: in place, a column is read before it is
written.
Read next: ``keeping.py``, ``step.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import math

import numpy as np
from numba import prange

from hyradix.kernels.numba_support import compiled
from hyradix.kernels.simd import LANES, at, vfma, vmul, vset
from hyradix.kernels.simd_rows import copy, load, store
from hyradix.kernels.tree_recurrence.step import (
    channel_decays,
    head_decay,
    step_channels,
    step_head,
)


@compiled()
def _move_window(windows, conv, layer, source, target, row, taps, j):
    """The target's window, column by column: of the row's columns, or (negative) the source's."""
    size, channels, columns = windows.shape[2], windows.shape[3], conv.shape[2]
    old, new = (
        (layer * windows.shape[1] + source) * size,
        (layer * windows.shape[1] + target) * size,
    )
    for i in range(size):
        tap = np.int64(taps[j, i])
        place = (new + i) * channels
        if tap >= 0:
            column = ((layer * conv.shape[1] + row) * columns + tap) * channels
            copy(conv, column, windows, place, channels)
        else:
            copy(windows, (old - 1 - tap) * channels, windows, place, channels)


@compiled()
def _copy_task(task, recurrent, windows, conv, states, sources, targets, rows, nodes, taps):
    num_heads, dk, dv = recurrent.shape[2:]
    size = num_heads * dk * dv
    layer, j = task // rows.size, task % rows.size
    row, target = np.int64(rows[j]), np.int64(targets[j])
    node = (layer * states.shape[1] + row) * states.shape[2] + nodes[j]
    copy(states, node * size, recurrent, (layer * recurrent.shape[1] + target) * size, size)
    _move_window(windows, conv, layer, np.int64(sources[j]), target, row, taps, j)


@compiled()
def copy_serial(recurrent, windows, conv, states, sources, targets, rows, nodes, taps):
    """``keeping.copy_nodes``; states ``[L, N+1, T, Hv, dk, dv]``."""
    for task in range(recurrent.shape[0] * rows.size):
        _copy_task(task, recurrent, windows, conv, states, sources, targets, rows, nodes, taps)


@compiled(parallel=True)
def copy_parallel(recurrent, windows, conv, states, sources, targets, rows, nodes, taps):
    """``copy_serial`` over all threads."""
    for i in prange(recurrent.shape[0] * rows.size):
        _copy_task(
            np.int64(i), recurrent, windows, conv, states, sources, targets, rows, nodes, taps
        )


@compiled()
def _replay_task(
    task, recurrent, windows, conv, k, v, g, beta, sources, targets, rows, counts, taps, has_delta
):  # fmt: skip
    num_heads, dk, dv = recurrent.shape[2:]
    head, j = task % num_heads, (task // num_heads) % rows.size
    layer = task // (num_heads * rows.size)
    row, source, target = np.int64(rows[j]), np.int64(sources[j]), np.int64(targets[j])
    pool = layer * recurrent.shape[1]
    place = ((pool + source) * num_heads + head) * dk * dv
    to = ((pool + target) * num_heads + head) * dk * dv
    k_head, width = head // (num_heads // k.shape[3]), g.shape[4]
    nothing, decays = np.empty(0, np.float32), np.empty(dk, np.float32)
    x = np.empty(dk + dv, np.float32)
    for token in range(counts[j]):
        held = (layer * k.shape[1] + row) * k.shape[2] + token
        lane = held * num_heads + head
        copy(k, (held * k.shape[3] + k_head) * dk, x, 0, dk)
        copy(v, lane * dv, x, dk, dv)
        if width > 1:
            channel_decays(g, lane * width, dk, decays)
            step_channels(recurrent, place, recurrent, to, x, -1, 0, dk, decays, at(beta, lane),
                          dk, dv, has_delta, nothing, 0)  # fmt: skip
        else:
            step_head(recurrent, place, recurrent, to, x, -1, 0, dk, head_decay(at(g, lane)),
                      at(beta, lane), dk, dv, has_delta, nothing, 0)  # fmt: skip
        place = to
    if head == 0:
        _move_window(windows, conv, layer, source, target, row, taps, j)


@compiled()
def replay_serial(
    recurrent, windows, conv, k, v, g, beta, sources, targets, rows, counts, taps, has_delta
):  # fmt: skip
    """``keeping.replay``; k ``[L, N+1, T, Hk, dk]`` and so on."""
    for task in range(recurrent.shape[0] * rows.size * recurrent.shape[2]):
        _replay_task(task, recurrent, windows, conv, k, v, g, beta, sources, targets, rows, counts,
                     taps, has_delta)  # fmt: skip


@compiled(parallel=True)
def replay_parallel(
    recurrent, windows, conv, k, v, g, beta, sources, targets, rows, counts, taps, has_delta
):  # fmt: skip
    """``replay_serial`` over all threads."""
    for i in prange(recurrent.shape[0] * rows.size * recurrent.shape[2]):
        _replay_task(np.int64(i), recurrent, windows, conv, k, v, g, beta, sources, targets, rows,
                     counts, taps, has_delta)  # fmt: skip


@compiled()
def _folded_keys(k, g, first, count, k_head, head, num_heads, dk, keep, keys):
    """keys ``[count, dk]`` = D(G_p - G_j) k_j, keep ``[dk]`` = e^(G_p); sums and e^ in float64."""
    width, num_k_heads = g.shape[4], k.shape[3]
    for channel in range(width):
        total = 0.0
        for j in range(count - 1, -1, -1):  # G_p - G_j is the sum of what comes after row j
            ratio = np.float32(0.0 if total < -80.0 else math.exp(total))  # no denormal numbers
            place = ((first + j) * num_k_heads + k_head) * dk
            if width == 1:
                for d in range(dk):
                    keys[j * dk + d] = at(k, place + d) * ratio
            else:
                keys[j * dk + channel] = at(k, place + channel) * ratio
            total += np.float64(at(g, ((first + j) * num_heads + head) * width + channel))
        keep[channel] = np.float32(math.exp(total))
    if width == 1:
        keep[:] = keep[0]


@compiled()
def _fold_task(
    task, recurrent, windows, conv, k, u, g, sources, targets, rows, counts, taps
):  # fmt: skip
    num_heads, dk, dv = recurrent.shape[2:]
    head, j = task % num_heads, (task // num_heads) % rows.size
    layer = task // (num_heads * rows.size)
    row, source, target = np.int64(rows[j]), np.int64(sources[j]), np.int64(targets[j])
    count, pool = np.int64(counts[j]), layer * recurrent.shape[1]
    place = ((pool + source) * num_heads + head) * dk * dv
    to = ((pool + target) * num_heads + head) * dk * dv
    first, group = (layer * k.shape[1] + row) * k.shape[2], num_heads // k.shape[3]
    keys, keep = np.empty(count * dk, np.float32), np.empty(dk, np.float32)
    _folded_keys(k, g, first, count, head // group, head, num_heads, dk, keep, keys)
    for c in range(0, dv, LANES):
        left = dv - c
        for i in range(dk):
            value = vmul(vset(at(keep, i)), load(recurrent, place + i * dv + c, left))
            for n in range(count):
                by = load(u, ((first + n) * num_heads + head) * dv + c, left)
                value = vfma(vset(at(keys, n * dk + i)), by, value)
            store(recurrent, to + i * dv + c, value, left)
    if head == 0:
        _move_window(windows, conv, layer, source, target, row, taps, j)


@compiled()
def fold_serial(recurrent, windows, conv, k, u, g, sources, targets, rows, counts, taps):
    """``keeping.fold``; k ``[L, N+1, R+T, Hk, dk]`` and so on."""
    for task in range(recurrent.shape[0] * rows.size * recurrent.shape[2]):
        _fold_task(task, recurrent, windows, conv, k, u, g, sources, targets, rows, counts, taps)


@compiled(parallel=True)
def fold_parallel(recurrent, windows, conv, k, u, g, sources, targets, rows, counts, taps):
    """``fold_serial`` over all threads."""
    for i in prange(recurrent.shape[0] * rows.size * recurrent.shape[2]):
        _fold_task(
            np.int64(i), recurrent, windows, conv, k, u, g, sources, targets, rows, counts, taps
        )


@compiled()
def move_rows(array, sources, targets):
    """``keeping.move_rows`` on ``[L, (N+1) M, elements]``: memory speed on one thread."""
    size = array.shape[2]
    for layer in range(array.shape[0]):
        base = layer * array.shape[1]
        for j in range(sources.size):
            copy(array, (base + sources[j]) * size, array, (base + targets[j]) * size, size)

"""The short convolution over draft trees, compiled: raw columns in, sums over taps out.

Owns: how taps name columns of a draft buffer or of the base's window. Does not know: families.

Invariants:
- Taps are summed from the oldest to the newest, as decode sums its window: the same bits.
- A task touches the channels of its own segments only: tasks of one tree may run side by side.
Read next: ``tree.py`` (the readable twin), ``../tree_recurrence/ragged.py`` (taps).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled
from hyradix.kernels.simd import LANES, vfma, vset
from hyradix.kernels.simd_rows import copy, load, store

_ZERO = np.float32(0.0)


@compiled()
def write_columns(
    projected, token, count, conv_state, slot, conv, row, first_node, num_base, segments
):  # fmt: skip
    """The tree's raw columns, and the base's newest ``num_base``, into a row of ``conv``.

    projected: raw channels stand first in a token's row. segments: ``[n, (start, count)]``.
    """
    channels, columns = conv.shape[2], conv.shape[1]
    window = conv_state.shape[1]
    for segment in range(segments.shape[0]):
        start, size = segments[segment, 0], segments[segment, 1]
        for j in range(num_base):
            source = (slot * window + window - num_base + j) * channels + start
            copy(conv_state, source, conv, (row * columns + j) * channels + start, size)
        for node in range(count):
            target = (row * columns + first_node + node) * channels + start
            copy(projected, (token + node) * projected.shape[1] + start, conv, target, size)


@compiled()
def convolve_node(conv, row, conv_state, slot, taps, node, segments, weight, w, mixed, place):
    """mixed[place:] = the convolution at a node (no bias, no activation), segment after segment.

    node: among all nodes of the step. weight: ``[.., K, channels of the segments]`` at flat w.
    """
    channels, columns, window = conv.shape[2], conv.shape[1], conv_state.shape[1]
    width = taps.shape[1]
    own = np.int64(0)
    for segment in range(segments.shape[0]):
        own += segments[segment, 1]
    done = np.int64(0)
    for segment in range(segments.shape[0]):
        start, size = segments[segment, 0], segments[segment, 1]
        for c in range(0, size, LANES):
            total = vset(_ZERO)
            for j in range(width):
                tap = np.int64(taps[node, j])
                by = load(weight, w + j * own + done + c, size - c)
                if tap >= 0:
                    x = load(conv, (row * columns + tap) * channels + start + c, size - c)
                else:
                    x = load(conv_state, (slot * window - 1 - tap) * channels + start + c, size - c)
                total = vfma(x, by, total)
            store(mixed, place + done + c, total, size - c)
        done += size

"""The short convolution of one token in compiled code, over a ring of raw columns.

Owns: pool window to ring and back, one token's convolution with silu.
Does not know: which channels a mixer needs (it passes segments), who owns a slot.

Invariants:
- The ring is ``[K, channels]`` flat; row ``newest`` holds the newest raw column, the row after it
  (cyclically) the oldest. ``segments`` ``int64[S, 2]``: first pool channel and count of each piece.
- The order of the additions is fixed: the same bits however a sequence is split into calls.
Read next: ``reference.py`` (the readable twin), ``../kda/compiled.py`` (a caller).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled, silu32
from hyradix.kernels.simd import LANES, vfma, vset
from hyradix.kernels.simd_rows import copy, load, store

_ZERO = np.float32(0.0)


@compiled()
def window_out(window, newest, width, channels, conv_state, base, stride, segments):
    """Ring -> pool rows [K-1, C] at flat ``base``, oldest first."""
    for j in range(width - 1):
        source = ((newest + 2 + j) % width) * channels
        for segment in range(segments.shape[0]):
            start, count = segments[segment, 0], segments[segment, 1]
            copy(window, source, conv_state, base + j * stride + start, count)
            source += count


@compiled()
def window_in(window, width, channels, conv_state, base, stride, segments):
    """Pool rows [K-1, C] -> ring rows 0..K-2; row K-1 is where the newest goes."""
    for j in range(width - 1):
        target = j * channels
        for segment in range(segments.shape[0]):
            start, count = segments[segment, 0], segments[segment, 1]
            copy(conv_state, base + j * stride + start, window, target, count)
            target += count


@compiled()
def convolve(projected, token, window, newest, width, channels, weight, w, mixed, segments):
    """Take one token's raw columns into the ring; mixed = silu(convolution).

    weight: ``[.., K, channels]``, this ring's at flat ``w``. token: flat place of its columns.
    """
    target = newest * channels
    for segment in range(segments.shape[0]):
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
    for c in range(channels):
        mixed[c] = silu32(mixed[c])

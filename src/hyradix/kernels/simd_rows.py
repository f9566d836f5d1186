"""Vector loads and stores at the ragged ends of rows, and a few loops over rows for all kernels.

Owns: how a count of elements is cut into sixteens. Does not know: what the rows are.
Invariant: every operation is explicit (no contraction, no reordering by the compiler): a loop gives
the same bits wherever it is inlined.
Read next: ``simd.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled
from hyradix.kernels.simd import (
    LANES,
    vfma,
    vload,
    vload_first,
    vmul,
    vset,
    vstore,
    vstore_first,
    vsum,
)

_ZERO = np.float32(0.0)


@compiled(inline=True)
def load(array, index, count):
    """array.flat[index : index + 16]; where fewer than 16 are left (``count``), zeros behind."""
    return vload(array, index) if count >= LANES else vload_first(array, index, count)


@compiled(inline=True)
def store(array, index, value, count):
    """The first ``count`` lanes (16 at most) to array.flat[index:]."""
    if count >= LANES:
        vstore(array, index, value)
    else:
        vstore_first(array, index, value, count)


@compiled(inline=True)
def copy(source, s, target, t, count):
    """target.flat[t : t + count] = source.flat[s : s + count]."""
    for c in range(0, count, LANES):
        store(target, t + c, load(source, s + c, count - c), count - c)


@compiled()
def dot(x, i, y, j, size):
    """Sum of x.flat[i:] * y.flat[j:] over ``size`` elements."""
    total = vset(_ZERO)
    for c in range(0, size, LANES):
        total = vfma(load(x, i + c, size - c), load(y, j + c, size - c), total)
    return vsum(total)


@compiled()
def scale(array, start, size, factor):
    """array.flat[start : start + size] *= factor."""
    by = vset(factor)
    for c in range(0, size, LANES):
        store(array, start + c, vmul(load(array, start + c, size - c), by), size - c)

"""Matrix products with few rows of x, where reading the weight is what costs.

Owns: how register tiles cover a matrix. Does not know: names, layers.
Invariant: an output element is summed in one order, whatever the number of rows: decoding a
sequence alone or in a batch gives the same bits.
Read next: ``tile.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
from numba import prange

from hyradix.kernels.linear.tile import dot_tile
from hyradix.kernels.numba_support import compiled

MAX_ROWS = 32
"""Above this many rows a BLAS is faster."""
BLOCK = 24
"""Weight rows that stay in the first-level cache while all rows of x pass over them."""


def is_supported() -> bool:
    """Whether this CPU has the thirty-two wide registers that the tiles are made for."""
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


@compiled()
def cover(weight, first, last, x, out):
    """out[:, first:last] = x @ weight[first:last].T."""
    size, stride, count = weight.shape[1], out.shape[1], x.shape[0]
    m = 0
    while m + 8 <= count:
        r = first
        while r + 3 <= last:
            dot_tile(3, 8, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 3
        while r < last:
            dot_tile(1, 8, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 1
        m += 8
    while m + 4 <= count:
        r = first
        while r + 6 <= last:
            dot_tile(6, 4, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 6
        while r < last:
            dot_tile(1, 4, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 1
        m += 4
    while m + 2 <= count:
        r = first
        while r + 8 <= last:
            dot_tile(8, 2, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 8
        while r < last:
            dot_tile(1, 2, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 1
        m += 2
    while m < count:
        r = first
        while r + 8 <= last:
            dot_tile(8, 1, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 8
        while r < last:
            dot_tile(1, 1, weight, r * size, x, m * size, size, out, m * stride + r, stride)
            r += 1
        m += 1


@compiled()
def _add(residual, first, last, out):
    for m in range(residual.shape[0]):
        for r in range(first, last):
            out[m, r] += residual[m, r]


@compiled(parallel=True)
def multiply(weight, x, residual, out):
    """out ``[M, O]`` = x ``[M, I]`` @ weight ``[O, I]``.T + residual ``[M, O]`` (``[0, 0]``: none).

    The weight is float32, or bf16 seen as uint16.
    """
    total = weight.shape[0]
    for block in prange((total + BLOCK - 1) // BLOCK):
        first = np.int64(block) * BLOCK
        last = min(total, first + BLOCK)
        cover(weight, first, last, x, out)
        _add(residual, first, last, out)

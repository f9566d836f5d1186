"""Products of one to four rows without matrix units: weights go from memory to registers, once.

Owns: the kernel for very few rows. Does not know: which products take it (``triton.py``).

A program asks for ``BLOCKS`` blocks of its weight rows before it uses the first: bytes under way
are what bounds it. Products of eight inputs, which one thread has, are summed at once, so sums need
few registers; across threads is summed at the end.

Invariants:
- The order of a row's sums depends on sizes and the configuration alone, not on other rows.
- Chained (``triton_support.py``): weights are asked for before the kernel before is done.
Read next: ``triton.py``, ``triton_units.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import triton
import triton.language as tl

from hyradix.kernels.triton_support import load32, silu, store, wait_for_previous

WIDTH = tl.constexpr(8)
"""Inputs of one thread's load: 16 bytes of bfloat16."""


@triton.jit
def vector_kernel(
    x, x_stride, weight, weight_stride, norm, eps, residual, residual_stride, out, out_stride,
    B, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr, ROWS: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr, BLOCKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS: at least B of them, all of whose sums are held at once.

    CHAINED: to wait for the kernel before also keeps the compiler from moving loads down to their
    first use, to save registers; so every group of blocks has a wait behind its loads.
    """
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    is_output = o < OUTPUTS
    place = weight + tl.minimum(o, OUTPUTS - 1).to(tl.int64)[:, None] * weight_stride
    second = place + tl.cast(weight_stride, tl.int64) * OUTPUTS if IS_SWIGLU else place
    totals, ups, squares = (), (), ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros([BO, BI // WIDTH], tl.float32),)
        ups += (tl.zeros([BO, BI // WIDTH], tl.float32),)
        squares += (tl.zeros([BI // WIDTH], tl.float32),)
    for group in tl.static_range(0, SIZE, BI * BLOCKS):
        weights, more = (), ()
        for j in tl.static_range(BLOCKS):
            if group + j * BI < SIZE:
                weights += (_block(place, group + j * BI, SIZE, BI),)
                if IS_SWIGLU:
                    more += (_block(second, group + j * BI, SIZE, BI),)
        wait_for_previous(CHAINED)
        for j in tl.static_range(BLOCKS):
            if group + j * BI < SIZE:
                i = group + j * BI + tl.arange(0, BI)
                first = weights[j].to(tl.float32)
                if HAS_NORM:
                    scales = load32(norm + i, i < SIZE)
                new_totals, new_ups, new_squares = (), (), ()
                for r in tl.static_range(ROWS):
                    inputs = load32(x + r * x_stride + i, (i < SIZE) & (r < B))
                    if HAS_NORM:
                        new_squares += (squares[r] + _by_thread(inputs * inputs),)
                        inputs *= scales
                    new_totals += (totals[r] + _by_thread(first * inputs[None, :]),)
                    if IS_SWIGLU:
                        product = more[j].to(tl.float32) * inputs[None, :]
                        new_ups += (ups[r] + _by_thread(product),)
                totals = new_totals
                if IS_SWIGLU:
                    ups = new_ups
                if HAS_NORM:
                    squares = new_squares
    for r in tl.static_range(ROWS):
        inside = is_output & (r < B)
        result = tl.sum(totals[r], 1)
        scale = 1.0
        if HAS_NORM:
            scale = 1.0 / tl.sqrt(tl.sum(squares[r], 0) / SIZE + eps)
        result *= scale
        if IS_SWIGLU:
            result = silu(result) * (tl.sum(ups[r], 1) * scale)
        if HAS_RESIDUAL:
            result += load32(residual + r * residual_stride + o, inside)
        store(out + r * out_stride + o, result, inside)


@triton.jit
def _block(place, first, SIZE: tl.constexpr, BI: tl.constexpr):
    """A block of weights, which no cache needs to keep; no mask where it is whole."""
    i = first + tl.arange(0, BI)
    if first + BI <= SIZE:
        return tl.load(place + i[None, :], eviction_policy="evict_first")
    else:
        return tl.load(place + i[None, :], mask=(i < SIZE)[None, :], other=0.0,
                       eviction_policy="evict_first")  # fmt: skip


@triton.jit
def _by_thread(x):
    """Sums of ``WIDTH`` neighbours of the last axis."""
    if len(x.shape) == 2:
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // WIDTH, WIDTH]), 2)
    else:
        return tl.sum(tl.reshape(x, [x.shape[0] // WIDTH, WIDTH]), 1)

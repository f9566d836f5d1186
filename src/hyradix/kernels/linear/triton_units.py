"""Products of few rows by matrix units: the weight's tiles are the first operand.

Owns: the kernel for few rows, the sum of its parts. Does not know: which products take it
(``triton.py``).

Sums are ``[outputs, rows]``: the weight goes through shared memory as it is stored, many outputs at
a time, so that of what a program reads little is inputs. Where outputs are few, inputs are split
among programs, and the last one to arrive adds the parts. Where the device has tensor descriptors
(TMA), tiles come by them: gates and ups of eight rows, norm and swiglu included, in 27 us, not 36.

Invariants:
- Parts are added in the order of inputs, whoever arrives last. Counters are 0 between launches.
- Chained (``triton_support.py``): the cache is asked for weights before the kernel before is done.
Read next: ``triton.py``, ``triton_vector.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import triton
import triton.language as tl

from hyradix.kernels.triton_support import load32, silu, store, wait_for_previous


@triton.jit(do_not_specialize=["B"])
def units_kernel(
    x, x_stride, weight, weight_stride, x_tiles, weight_tiles, residual, residual_stride, out,
    out_stride, parts, counters, B, SIZE: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, HAS_TILES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """SHARE: inputs of a program, a multiple of BI. AHEAD: those it asks for early, if chained.

    x_tiles, weight_tiles: descriptors of x by [BB, BI] and of the weight by [BO, BI], if HAS_TILES.
    """
    output = tl.program_id(0) * BO
    b, o = tl.arange(0, BB), output + tl.arange(0, BO)
    low = tl.program_id(1) * SHARE
    is_row, is_output = b < B, o < OUTPUTS
    begin = tl.minimum(o, OUTPUTS - 1).to(tl.int64)
    if CHAINED and AHEAD > 0:
        _ask_for(weight, begin, weight_stride, low, AHEAD, SIZE)
        if IS_SWIGLU:
            _ask_for(weight, begin + OUTPUTS, weight_stride, low, AHEAD, SIZE)
    wait_for_previous(CHAINED)
    total, ups = tl.zeros([BO, BB], tl.float32), tl.zeros([BO, BB], tl.float32)
    for first in tl.range(low, tl.minimum(low + SHARE, SIZE), BI, num_stages=STAGES):
        if HAS_TILES:
            inputs = x_tiles.load([0, first]).T
            total = tl.dot(weight_tiles.load([output, first]), inputs, total)
            if IS_SWIGLU:
                ups = tl.dot(weight_tiles.load([OUTPUTS + output, first]), inputs, ups)
        else:
            i = first + tl.arange(0, BI)
            inside = is_row[None, :] & (i < SIZE)[:, None]
            inputs = tl.load(x + b[None, :] * x_stride + i[:, None], mask=inside, other=0.0)
            place = weight + begin[:, None] * weight_stride
            total = tl.dot(_block(place, i, SIZE, BI), inputs, total)
            if IS_SWIGLU:
                place = weight + (begin + OUTPUTS)[:, None] * weight_stride
                ups = tl.dot(_block(place, i, SIZE, BI), inputs, ups)
    if SPLITS > 1:
        total, is_last = _sum_parts(total, parts, counters, BO, BB, SPLITS)
        is_output &= is_last
    inside = is_output[:, None] & is_row[None, :]
    if IS_SWIGLU:
        total = silu(total) * ups
    if HAS_RESIDUAL:
        total += load32(residual + b[None, :] * residual_stride + o[:, None], inside)
    store(out + b[None, :] * out_stride + o[:, None], total, inside)


@triton.jit
def _block(place, i, SIZE: tl.constexpr, BI: tl.constexpr):
    """Weights ``[BO, BI]`` of the inputs i."""
    if SIZE % BI == 0:
        return tl.load(place + i[None, :])
    return tl.load(place + i[None, :], mask=(i < SIZE)[None, :], other=0.0)


@triton.jit
def _ask_for(weight, row, weight_stride, low, AHEAD: tl.constexpr, SIZE: tl.constexpr):
    """AHEAD inputs, from ``low`` on, of weight rows, into the cache; all in units of 16 bytes."""
    begin = (weight + row * weight_stride + low).to(tl.int64)
    num_bytes = 2 * tl.minimum(SIZE - low, AHEAD)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [begin, num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _sum_parts(total, parts, counters, BO: tl.constexpr, BB: tl.constexpr, SPLITS: tl.constexpr):
    """(sum of all splits' totals, True) for the last program to arrive, else (any, False)."""
    column, count = tl.program_id(0), tl.num_programs(0)
    tile = tl.arange(0, BO)[:, None] * BB + tl.arange(0, BB)[None, :]
    place = parts + column * (BO * BB) + tile
    tl.store(place + tl.program_id(1) * count * (BO * BB), total)
    tl.debug_barrier()  # of all threads, before the one that counts
    is_last = tl.atomic_add(counters + column, 1, sem="acq_rel") == SPLITS - 1
    tl.store(counters + column, 0, mask=is_last)
    if is_last:
        total = tl.load(place, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            total += tl.load(place + split * count * (BO * BB), cache_modifier=".cg")
    return total, is_last

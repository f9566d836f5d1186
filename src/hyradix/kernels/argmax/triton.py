"""Greedy tokens and their faults on the GPU: logits are read once.

Owns: how rows are shared among programs. Does not know: where tokens go.

A program finds the best of its part of a row; a second launch the best of the parts.

Invariants:
- Of equal logits the lower id, whoever reads it.
- NaN counts as infinite: a row is faulty exactly where its largest logit is not finite.
Read next: ``reference.py`` (the readable twin).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import ceil_div, launch, power_of_two

_PROGRAMS = 1056
"""About as many as a device runs at once."""


@dataclass(frozen=True, slots=True)
class ArgmaxConfig:
    """Logits at a time of a program, and its warps."""

    block: int
    num_warps: int = 4


def best_of(
    logits: torch.Tensor, out: torch.Tensor, *, config: ArgmaxConfig | None = None
) -> torch.Tensor:
    """out ``int32[2, M]``: the argmax of ``float32[M, V]``, or 0 and 1 where it is not finite.

    Returns: out.
    """
    rows, size = logits.shape
    assert logits.stride(1) == out.stride(1) == 1
    if not rows:
        return out
    config = config or ArgmaxConfig(1024 if rows < 8 else 4096)
    blocks = ceil_div(size, config.block)
    share = ceil_div(blocks, max(1, min(blocks, _PROGRAMS // rows)))
    parts = ceil_div(blocks, share)
    values = logits.new_empty(rows, parts)
    ids = out.new_empty(rows, parts)
    launch(
        _part_kernel, (rows, parts), logits, logits.stride(0), values, ids, size,
        share * config.block, config.block, num_warps=config.num_warps,
    )  # fmt: skip
    launch(
        _whole_kernel, (rows,), values, ids, out, out.stride(0), parts, power_of_two(parts),
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _part_kernel(logits, stride, values, ids, SIZE: tl.constexpr, SHARE, BLOCK: tl.constexpr):
    """The best of SHARE logits of a row, the first of equals."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, i = part * SHARE, tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = low + i
    for first in range(low, tl.minimum(low + SHARE, SIZE), BLOCK):
        x = tl.load(logits + row * stride + first + i, mask=first + i < SIZE, other=float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        is_better = x > best
        best = tl.where(is_better, x, best)
        at = tl.where(is_better, first + i, at)
    top = tl.max(best, 0)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, top)
    tl.store(ids + place, tl.min(tl.where(best == top, at, SIZE), 0))


@triton.jit(do_not_specialize=["parts"])
def _whole_kernel(values, ids, out, out_stride, parts, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_part = i < parts
    best = tl.load(values + row * parts + i, mask=is_part, other=float("-inf"))
    at = tl.load(ids + row * parts + i, mask=is_part, other=2147483647)
    top = tl.max(best, 0)
    is_faulty = tl.abs(top) == float("inf")
    tl.store(out + row, tl.where(is_faulty, 0, tl.min(tl.where(best == top, at, 2147483647), 0)))
    tl.store(out + out_stride + row, is_faulty.to(tl.int32))

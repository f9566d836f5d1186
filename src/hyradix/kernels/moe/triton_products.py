"""Products of experts on the GPU: blocks of pairs with their expert's matrix; the weighted sum.

Owns: ``product``, ``combine``. Does not know: how pairs came into their places, which tokens are
whose.

A program takes one block of one expert's pairs and some outputs, so that with few tokens every
chosen expert's weights are read once. There are as many programs as the worst case of a batch
needs; those without a block return.

Invariants: sums are float32, over inputs and choices in one order; a row of NaN stays in its row.
Read next: ``triton.py`` (the caller), ``../triton_table.py`` (block sizes).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import ceil_div, launch, load32, power_of_two, silu, store
from hyradix.kernels.triton_table import ProductConfig

_COLUMNS = 1024
"""Outputs of one token that a program sums."""


@dataclass(frozen=True, slots=True)
class Groups:
    """What ``group_pairs`` fills; is_alone: it did not, and blocks are the pairs' experts."""

    order: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor
    is_alone: bool


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
    block_m: int,
    config: ProductConfig,
    top_k: int,
    activation: str,
) -> None:
    """out's rows are places; x's are tokens where ``top_k`` says how many places each has."""
    outputs, size = out.shape[1], weight.shape[2]
    block_n = min(config.block_n, power_of_two(outputs, least=16))
    block_k = min(config.block_k, power_of_two(size, least=16))
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    launch(
        _product_kernel,
        (groups.blocks.shape[0] * ceil_div(outputs, block_n),),
        x, x.stride(0), weight, groups.order, groups.offsets, groups.blocks, out, weight.shape[1],
        size, outputs, top_k, groups.is_alone, activation == "swiglu", activation == "relu2",
        block_m, block_n, block_k, size % block_k == 0, precision, config.stages,
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip


def combine(
    products: torch.Tensor,
    groups: Groups,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out ``[T, H]`` = residual + weighted sums of each token's rows of products ``[T k, H]``."""
    (count, top_k), width = weights.shape, out.shape[1]
    other = out if residual is None else residual
    launch(
        _combine_kernel,
        (count, ceil_div(width, _COLUMNS)),
        products, groups.places, weights, other, other.stride(0), out, out.stride(0),
        width, top_k, residual is not None, groups.is_alone, _COLUMNS,
    )  # fmt: skip


@triton.jit
def _product_kernel(
    x, x_stride, weight, order, offsets, blocks, out,
    ROWS: tl.constexpr, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr,
    IS_ALONE: tl.constexpr, IS_SWIGLU: tl.constexpr, IS_RELU2: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs past the end are computed as output 0 and not stored."""
    TILES: tl.constexpr = (OUTPUTS + BN - 1) // BN
    block = tl.program_id(0) // TILES
    if IS_ALONE:
        expert = tl.load(blocks + block).to(tl.int64)
        place = block + tl.arange(0, BM)
        is_row = place == block
        row = place // TOP_K if TOP_K > 0 else place
    else:
        expert = tl.load(blocks + 2 * block).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(blocks + 2 * block + 1) + tl.arange(0, BM)
        is_row = place < tl.load(offsets + expert + 1)
        row = place
        if TOP_K > 0:
            row = tl.load(order + place, mask=is_row, other=0) // TOP_K
    n, i = tl.program_id(0) % TILES * BN + tl.arange(0, BN), tl.arange(0, BK)
    source = x + row.to(tl.int64)[:, None] * x_stride
    real = tl.where(n < OUTPUTS, n, 0)
    weight += expert * (ROWS * SIZE) + real[None, :] * SIZE
    total = tl.zeros([BM, BN], tl.float32)
    ups = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, SIZE, BK, num_stages=STAGES):
        k = first + i
        if IS_EVEN:
            inputs = tl.load(source + k[None, :], mask=is_row[:, None], other=0.0)
            weights = tl.load(weight + k[:, None])
        else:
            inside = is_row[:, None] & (k < SIZE)[None, :]
            inputs = tl.load(source + k[None, :], mask=inside, other=0.0)
            weights = tl.load(weight + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
        total = tl.dot(inputs, weights, total, input_precision=PRECISION)
        if IS_SWIGLU:
            if IS_EVEN:
                weights = tl.load(weight + OUTPUTS * SIZE + k[:, None])
            else:
                place_up = weight + OUTPUTS * SIZE + k[:, None]
                weights = tl.load(place_up, mask=(k < SIZE)[:, None], other=0.0)
            ups = tl.dot(inputs, weights, ups, input_precision=PRECISION)
    if IS_SWIGLU:
        total = silu(total) * ups
    if IS_RELU2:
        total = tl.where(total < 0.0, 0.0, total)
        total *= total
    target = out + place.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    store(target, total, is_row[:, None] & (n < OUTPUTS)[None, :])


@triton.jit
def _combine_kernel(
    products, places, weights, residual, residual_stride, out, out_stride,
    WIDTH: tl.constexpr, K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + sum over choices, in their order."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = token * K + j
        if not IS_ALONE:
            place = tl.load(places + place).to(tl.int64)
        weight = tl.load(weights + token * K + j)
        total += weight * load32(products + place * WIDTH + c, inside)
    if HAS_RESIDUAL:
        total += load32(residual + token * residual_stride + c, inside)
    store(out + token * out_stride + c, total, inside)

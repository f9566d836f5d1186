"""Products of few rows with a bfloat16 weight: one pass over the weight, its neighbours fused in.

Owns: ``few_rows_linear``: norm before; bias, residual or swiglu behind. Does not know: layers.
For up to 16 rows the time is that of reading the weight, so what stands around it is done by
programs that wait for memory anyway; from 17 rows on torch's own product is as good.

Invariants:
- A row's result does not depend on the other rows: sums run over inputs in one fixed order.
- Sums are float32. The norm's scale is taken in the same pass and applied to the sum.
Read next: ``triton_table.py`` (block sizes).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import launch, load32, power_of_two, silu, store
from hyradix.kernels.triton_table import LinearConfig, linear_config

MAX_ROWS = 16


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    is_swiglu: bool = False,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """out = rms_norm(x) times weight plus residual, each part where it is given.

    Args:
        x: ``[B, I]``, at most ``MAX_ROWS``. weight: ``[O, I]``. norm: ``float32[I]``. residual,
            out: ``[B, O]`` (may be one). is_swiglu: weight rows are O/2 gates, then O/2 ups, and
            out ``[B, O/2]`` is silu(gates) * ups; no residual.

    Returns: out.
    """
    rows, size = x.shape
    assert rows <= MAX_ROWS
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert not (is_swiglu and residual is not None)
    outputs = out.shape[1]
    config = config or linear_config(x.device, outputs, rows)
    if rows == 1 and not config.has_units:
        return _one_row(x, weight, out, norm, eps, residual, is_swiglu, config)
    block_i = min(config.block_i, power_of_two(size, least=16))
    block_o = max(config.block_o // (1 + is_swiglu), 16)
    other = out if residual is None else residual
    launch(
        _few_rows_kernel,
        (triton.cdiv(outputs, block_o),),
        x, x.stride(0), weight, weight.stride(0), x if norm is None else norm, eps,
        other, other.stride(0), out, out.stride(0),
        rows, size, outputs, norm is not None, residual is not None, is_swiglu,
        MAX_ROWS, block_o, block_i, size % block_i == 0 and outputs % block_o == 0, config.stages,
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B"])
def _few_rows_kernel(
    x, x_stride, weight, weight_stride, norm, eps, residual, residual_stride, out, out_stride,
    B, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr, IS_EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, o = tl.arange(0, BB), tl.program_id(0) * BO + tl.arange(0, BO)
    o64 = o.to(tl.int64)
    is_row, is_output = b < B, o < OUTPUTS
    total = tl.zeros([BB, BO], tl.float32)
    ups = tl.zeros([BB, BO], tl.float32)
    squares = tl.zeros([BB], tl.float32)
    for first in tl.range(0, SIZE, BI, num_stages=STAGES):
        i = first + tl.arange(0, BI)
        if IS_EVEN:
            weights = tl.load(weight + o64[None, :] * weight_stride + i[:, None])
        else:
            inside = is_output[None, :] & (i < SIZE)[:, None]
            place = weight + o64[None, :] * weight_stride + i[:, None]
            weights = tl.load(place, mask=inside, other=0.0)
        inputs = tl.load(
            x + b[:, None] * x_stride + i[None, :],
            mask=is_row[:, None] & (i < SIZE)[None, :],
            other=0.0,
        )
        if HAS_NORM:
            wide = inputs.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            inputs = (wide * load32(norm + i, i < SIZE)[None, :]).to(weights.dtype)
        total = tl.dot(inputs, weights, total)
        if IS_SWIGLU:
            place = weight + (o64 + OUTPUTS)[None, :] * weight_stride + i[:, None]
            inside = is_output[None, :] & (i < SIZE)[:, None]
            ups = tl.dot(inputs, tl.load(place, mask=inside, other=0.0), ups)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(squares / SIZE + eps)
        total *= scale[:, None]
        ups *= scale[:, None]
    inside = is_row[:, None] & is_output[None, :]
    if IS_SWIGLU:
        total = silu(total) * ups
    if HAS_RESIDUAL:
        total += load32(residual + b[:, None] * residual_stride + o[None, :], inside)
    store(out + b[:, None] * out_stride + o[None, :], total, inside)


def _one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    is_swiglu: bool,
    config: LinearConfig,
) -> torch.Tensor:
    size, outputs = x.shape[1], out.shape[1]
    launch(
        _one_row_kernel,
        (triton.cdiv(outputs, config.block_o),),
        x, weight, weight.stride(0), x if norm is None else norm, eps,
        out if residual is None else residual, out,
        size, outputs, norm is not None, residual is not None, is_swiglu,
        config.block_o, min(config.block_i, power_of_two(size)), config.stages,
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip
    return out


@triton.jit
def _one_row_kernel(
    x, weight, weight_stride, norm, eps, residual, out,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Products stay apart by input until the end: no sum across threads inside of the loop."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    is_output = o < OUTPUTS
    place = weight + o.to(tl.int64)[:, None] * weight_stride
    total, ups = tl.zeros([BO, BI], tl.float32), tl.zeros([BO, BI], tl.float32)
    squares = tl.zeros([BI], tl.float32)
    for first in tl.range(0, SIZE, BI, num_stages=STAGES):
        i = first + tl.arange(0, BI)
        in_size = i < SIZE
        inside = is_output[:, None] & in_size[None, :]
        inputs = load32(x + i, in_size)
        if HAS_NORM:
            squares += inputs * inputs
            inputs *= load32(norm + i, in_size)
        total += inputs[None, :] * load32(place + i[None, :], inside)
        if IS_SWIGLU:
            second = place + OUTPUTS * weight_stride + i[None, :]
            ups += inputs[None, :] * load32(second, inside)
    result = tl.sum(total, 1)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    result *= scale
    if IS_SWIGLU:
        result = silu(result) * (tl.sum(ups, 1) * scale)
    if HAS_RESIDUAL:
        result += load32(residual + o, is_output)
    store(out + o, result, is_output)

"""Root-mean-square norms on the GPU: after a sum with the residual, and gated, by groups.

Owns: ``add_rms_norm``, ``gated_rms_norm``. Invariant: float32 inside, whatever the types outside.
Read next: ``reference.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import (
    ceil_div,
    launch,
    load32,
    power_of_two,
    sigmoid,
    silu,
    store,
    wait_for_previous,
)

_NUMBERS = 1024
"""Of a program of the gated norm, in as many groups as they fill."""


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """total = x + residual, out = rms_norm(total): all ``[T, C]``; weight ``float32[C]``.

    Without a residual total is not written. total may be residual or x.
    """
    assert x.stride(1) == total.stride(1) == out.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    size = x.shape[1]
    other = x if residual is None else residual
    launch(
        _add_norm_kernel,
        (x.shape[0],),
        x, x.stride(0), other, other.stride(0), weight, eps, total, total.stride(0),
        out, out.stride(0), residual is not None, size, power_of_two(size),
        num_warps=8 if size > 4096 else 4, is_chained=True,
    )  # fmt: skip
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    gate_first: bool = False,
    activation: str = "silu",
    skip: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> torch.Tensor:
    """rms_norm(x) * act(gate), or (gate_first, Mamba2) rms_norm(x * act(gate)), by groups.

    x is x + skip * v where those are given: skip ``float32[groups, V]``, v as x.

    x, gate, out: ``[T, groups, V]``, the last dimension dense; out may be x. weight: ``float32[V]``
    or ``float32[groups, V]``. activation: "silu" or (KDA) "sigmoid".
    """
    tokens, groups, size = x.shape
    assert x.stride(2) == gate.stride(2) == out.stride(2) == 1
    assert v is None or v.stride(2) == 1
    other, block = x if v is None else v, power_of_two(size)
    together = min(power_of_two(groups), max(1, _NUMBERS // block))
    launch(
        _gated_norm_kernel,
        (tokens * ceil_div(groups, together),),  # neighbours have what stands side by side
        x, *x.stride()[:2], gate, *gate.stride()[:2], weight,
        weight.stride(0) if weight.ndim == 2 else 0, weight if skip is None else skip, other,
        *other.stride()[:2], eps, out, *out.stride()[:2],
        skip is not None, gate_first, activation == "silu", groups, together, size, block,
        num_warps=1 if together * block <= 256 else 4, is_chained=True,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm_kernel(
    x, x_stride, residual, residual_stride, weight, eps, total, total_stride, out, out_stride,
    HAS_RESIDUAL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < SIZE
    scales = load32(weight + c, mask)
    wait_for_previous(CHAINED)
    value = load32(x + token * x_stride + c, mask)
    if HAS_RESIDUAL:
        value += load32(residual + token * residual_stride + c, mask)
        store(total + token * total_stride + c, value, mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    store(out + token * out_stride + c, value * scale * scales, mask)


@triton.jit
def _gated_norm_kernel(
    x, x_token, x_group, gate, gate_token, gate_group, weight, weight_group,
    skip, v, v_token, v_group, eps, out, out_token, out_group,
    HAS_SKIP: tl.constexpr, GATE_FIRST: tl.constexpr, IS_SILU: tl.constexpr,
    GROUPS: tl.constexpr, TOGETHER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """TOGETHER groups of a token: one small group a program would be programs to start, no more."""
    PARTS: tl.constexpr = (GROUPS + TOGETHER - 1) // TOGETHER
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    group = tl.program_id(0) % PARTS * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    mask = (group < GROUPS) & (c < SIZE)
    wait_for_previous(CHAINED)
    value = load32(x + token * x_token + group * x_group + c, mask)
    if HAS_SKIP:
        skipped = load32(v + token * v_token + group * v_group + c, mask)
        value += skipped * load32(skip + group * SIZE + c, mask)
    z = load32(gate + token * gate_token + group * gate_group + c, mask)
    factor = silu(z) if IS_SILU else sigmoid(z)
    if GATE_FIRST:
        value *= factor
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / SIZE + eps)
    value *= scale[:, None] * load32(weight + group * weight_group + c, mask)
    if not GATE_FIRST:
        value *= factor
    store(out + token * out_token + group * out_group + c, value, mask)

"""Activations of a feed-forward layer in one pass. Read next: ``reference.py``."""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.triton_support import ceil_div, launch, load32, silu, store, wait_for_previous

_BLOCK = 1024


def activate(x: torch.Tensor, activation: Activation, out: torch.Tensor) -> torch.Tensor:
    """See ``reference.activate``; out ``[T, I]``."""
    return swiglu(x, out) if activation == "swiglu" else relu2(x, out)


def relu2(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared, ``[T, I]`` -> out ``[T, I]``."""
    return _by_token(_relu2_kernel, x, out)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``[T, 2I]`` (gates, then ups) -> out ``[T, I]``; sums in float32."""
    return _by_token(_swiglu_kernel, gate_up, out)


def _by_token(kernel: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``kernel`` over blocks of each token's outputs."""
    assert x.stride(1) == out.stride(1) == 1
    size = out.shape[1]
    grid = (x.shape[0], ceil_div(size, _BLOCK))
    launch(kernel, grid, x, x.stride(0), out, out.stride(0), size, _BLOCK, is_chained=True)
    return out


@triton.jit
def _swiglu_kernel(
    gate_up, stride, out, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait_for_previous(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = load32(gate_up + token * stride + i, i < SIZE)
    up = load32(gate_up + token * stride + SIZE + i, i < SIZE)
    store(out + token * out_stride + i, silu(gate) * up, i < SIZE)


@triton.jit
def _relu2_kernel(
    x, stride, out, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    wait_for_previous(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = load32(x + token * stride + i, i < SIZE)
    value = tl.where(value < 0.0, 0.0, value)
    store(out + token * out_stride + i, value * value, i < SIZE)

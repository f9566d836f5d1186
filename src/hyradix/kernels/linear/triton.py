"""Products of few rows with a bfloat16 weight: one pass over the weight, its neighbours fused in.

Owns: ``few_rows_linear``: norm before; bias, residual or swiglu behind; which kernel takes it, and
the grid. Does not know: layers.
For few rows the time is that of reading the weight, so what stands around it is done by programs
that wait for memory anyway. A norm is done so for up to two rows; from then on it is a launch of
its own, which takes less than to scale all tiles of x, in every program.

Invariants:
- A row's result does not depend on the other rows: sums run over inputs in one fixed order.
- Sums are float32.
Read next: ``triton_vector.py``, ``triton_units.py`` (the kernels), ``triton_table.py`` (sizes).
"""
# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hyradix.kernels.linear.triton_units import units_kernel
from hyradix.kernels.linear.triton_vector import vector_kernel
from hyradix.kernels.rms_norm.triton import add_rms_norm
from hyradix.kernels.triton_support import ceil_div, has_descriptors, launch, power_of_two
from hyradix.kernels.triton_table import LinearConfig, linear_config

MAX_ROWS = 64
MAX_VECTOR_ROWS = 4
NUM_PARTS = 1 << 20
"""Numbers that the parts of a split product usually have room for: 4 MiB."""


class LinearScratch:
    """Memory that split products use in turn: ``capacity`` numbers of parts, at least 16 for each
    output of a part, and a counter for each 16 outputs."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.parts = torch.empty(capacity, device=device)
        self.counters = torch.zeros(capacity // 256, dtype=torch.int32, device=device)


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
    scratch: LinearScratch | None = None,
) -> torch.Tensor:
    """out = rms_norm(x) times weight plus residual, each part where it is given.

    Args:
        x: ``[B, I]``, at most ``MAX_ROWS``. weight: ``[O, I]``. norm: ``float32[I]``. residual,
            out: ``[B, O]`` (may be one). is_swiglu: weight rows are O/2 gates, then O/2 ups, and
            out ``[B, O/2]`` is silu(gates) * ups; no residual. scratch: without it, and with
            swiglu, inputs are not split among programs. config: block_o counts weight rows.

    Returns: out.
    """
    rows, size = x.shape
    assert rows <= MAX_ROWS
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert not (is_swiglu and residual is not None)
    outputs = out.shape[1]
    config = config or linear_config(
        x.device, weight.shape[0], size, rows, is_gated=is_swiglu,
        has_descriptors=has_descriptors(x.device),
    )  # fmt: skip
    if config.has_units:
        if norm is not None:
            x = add_rms_norm(x, None, norm, eps, x, torch.empty_like(x))
        _with_units(x, weight, out, residual, config, scratch, is_swiglu=is_swiglu)
        return out
    assert rows <= MAX_VECTOR_ROWS
    other = out if residual is None else residual
    block_o = max(config.block_o // (1 + is_swiglu), 1)
    launch(
        vector_kernel, (ceil_div(outputs, block_o),), x, x.stride(0), weight, weight.stride(0),
        x if norm is None else norm, eps, other, other.stride(0), out, out.stride(0), rows, size,
        outputs, norm is not None, residual is not None, is_swiglu, power_of_two(rows), block_o,
        min(config.block_i, power_of_two(size, least=8)), config.stages,
        num_warps=config.num_warps, is_chained=True,
    )  # fmt: skip
    return out


def _with_units(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    config: LinearConfig,
    scratch: LinearScratch | None,
    *,
    is_swiglu: bool,
) -> None:
    """The second operand has 16 columns where groups of four warps make products, else 8 do."""
    (rows, size), outputs = x.shape, out.shape[1]
    has_groups = config.num_warps % 4 == 0 and config.block_o >= 64
    block_b = power_of_two(rows, least=16 if has_groups else 8)
    block_o = config.block_o // (1 + is_swiglu)
    block_i = min(config.block_i, power_of_two(size, least=16))
    blocks, steps = ceil_div(outputs, block_o), ceil_div(size, block_i)
    parts = counters = x
    splits = 1
    if scratch is not None and not is_swiglu:
        parts, counters = scratch.parts, scratch.counters
        room = scratch.parts.numel() // (blocks * block_o * block_b)
        splits = max(1, min(config.splits, steps // 2, room))
    share = ceil_div(steps, splits)
    splits = ceil_div(steps, share)
    is_aligned = weight.itemsize == 2 and _is_aligned(weight)
    ahead = (config.stages - 1) * block_i if is_aligned and size % 8 == 0 else 0
    tiles: tuple[Any, Any] = x, weight
    has_tiles = is_aligned and _is_aligned(x) and has_descriptors(x.device)
    if has_tiles:
        tiles = _described(x, block_b, block_i), _described(weight, block_o, block_i)
    other = out if residual is None else residual
    launch(
        units_kernel, (blocks, splits), x, x.stride(0), weight, weight.stride(0), *tiles, other,
        other.stride(0), out, out.stride(0), parts, counters, rows, size, outputs,
        residual is not None, is_swiglu, block_b, block_o, block_i, splits, share * block_i, ahead,
        config.stages, has_tiles,
        num_warps=config.num_warps, num_stages=config.stages, is_chained=True,
    )  # fmt: skip


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether all rows of a bfloat16 matrix begin at multiples of 16 bytes."""
    return x.stride(0) % 8 == x.data_ptr() % 16 == 0


def _described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])

"""Products of few rows with a bfloat16 weight: one pass over the weight, its neighbours fused in.

Owns: ``few_rows_linear``: norm before; bias, residual or swiglu behind; which kernel takes it, and
the grid. Does not know: layers.
For up to 16 rows the time is that of reading the weight, so what stands around it is done by
programs that wait for memory anyway; from 17 rows on torch's own product is as good.

Invariants:
- A row's result does not depend on the other rows: sums run over inputs in one fixed order.
- Sums are float32. The norm's scale is taken in the same pass and applied to the sum.
Read next: ``triton_vector.py``, ``triton_units.py`` (the kernels), ``triton_table.py`` (sizes).
"""
# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import torch

from hyradix.kernels.linear.triton_units import units_kernel
from hyradix.kernels.linear.triton_vector import vector_kernel
from hyradix.kernels.triton_support import ceil_div, launch, power_of_two
from hyradix.kernels.triton_table import LinearConfig, linear_config

MAX_ROWS = 16
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
            out ``[B, O/2]`` is silu(gates) * ups; no residual. scratch: without it, and with a
            norm or swiglu, inputs are not split among programs. config: block_o counts weight
            rows.

    Returns: out.
    """
    rows, size = x.shape
    assert rows <= MAX_ROWS
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert not (is_swiglu and residual is not None)
    outputs = out.shape[1]
    config = config or linear_config(x.device, weight.shape[0], size, rows, is_gated=is_swiglu)
    other = out if residual is None else residual
    tensors = (
        x, x.stride(0), weight, weight.stride(0), x if norm is None else norm, eps,
        other, other.stride(0), out, out.stride(0),
    )  # fmt: skip
    shape = size, outputs, norm is not None, residual is not None, is_swiglu
    if not config.has_units:
        assert rows <= MAX_VECTOR_ROWS
        block_o = max(config.block_o // (1 + is_swiglu), 1)
        launch(
            vector_kernel, (ceil_div(outputs, block_o),), *tensors, rows, *shape,
            power_of_two(rows), block_o, min(config.block_i, power_of_two(size, least=8)),
            config.stages, num_warps=config.num_warps, is_chained=True,
        )  # fmt: skip
        return out
    _with_units(tensors, rows, shape, config, None if norm is not None else scratch)
    return out


def _with_units(
    tensors: tuple[Any, ...],
    rows: int,
    shape: tuple[int, int, bool, bool, bool],
    config: LinearConfig,
    scratch: LinearScratch | None,
) -> None:
    """The second operand has 16 columns where groups of four warps make products, else 8 do."""
    size, outputs, _, _, is_swiglu = shape
    weight = tensors[2]
    has_groups = config.num_warps % 4 == 0 and config.block_o >= 64
    block_b = power_of_two(rows, least=16 if has_groups else 8)
    block_o = config.block_o // (1 + is_swiglu)
    block_i = min(config.block_i, power_of_two(size, least=16))
    blocks, steps = ceil_div(outputs, block_o), ceil_div(size, block_i)
    parts = counters = tensors[0]
    splits = 1
    if scratch is not None and not is_swiglu:
        parts, counters = scratch.parts, scratch.counters
        room = scratch.parts.numel() // (blocks * block_o * block_b)
        splits = max(1, min(config.splits, steps // 2, room))
    share = ceil_div(steps, splits)
    splits = ceil_div(steps, share)
    is_aligned = size % 8 == weight.stride(0) % 8 == weight.data_ptr() % 16 == 0
    ahead = (config.stages - 1) * block_i if is_aligned and weight.itemsize == 2 else 0
    launch(
        units_kernel, (blocks, splits), *tensors, parts, counters, rows, *shape, block_b, block_o,
        block_i, splits, share * block_i, ahead, config.stages,
        num_warps=config.num_warps, num_stages=config.stages, is_chained=True,
    )  # fmt: skip

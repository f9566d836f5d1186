"""One decode step of the short convolution by state slot: in place, or with columns in a log.

Owns: ``conv_step_`` and ``conv_log_step_`` for families without a fused step. Does not know: gates.

Invariants:
- A channel is read and written by one thread, so a window moves in place.
- By a log the window is only read; raw column ``num_log_rows[n]`` of the log is written.
- Rows of the sink (slot 0) are padding: zeros.
Read next: ``reference.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import ceil_div, launch, load32, silu, store

_BLOCK = 256


def conv_step_(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out ``[N, C]`` = silu(convolution) of x ``[N, C]``; the windows move on.

    weight: ``float32[K, C]``. bias: ``float32[C]``. slots: ``int32[N]``. conv_state: ``[slots, K-1,
    C]``, contiguous.
    """
    return _launch(x, weight, bias, slots, conv_state, out, None, None, None)


def conv_log_step_(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_log_rows: torch.Tensor,
    conv_state: torch.Tensor,
    log: SpecLayer,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same behind base and log, x to the log's columns; rows, num_log_rows ``int32[N]``."""
    return _launch(x, weight, bias, slots, conv_state, out, rows, num_log_rows, log)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    num_log_rows: torch.Tensor | None,
    log: SpecLayer | None,
) -> torch.Tensor:
    channels, is_log = x.shape[1], log is not None
    assert x.stride(1) == out.stride(1) == 1
    assert conv_state.is_contiguous()
    assert weight.is_contiguous()
    launch(
        _conv_kernel,
        (x.shape[0], ceil_div(channels, _BLOCK)),
        x, x.stride(0), weight, weight if bias is None else bias, slots,
        rows if is_log else slots, num_log_rows if is_log else slots, conv_state,
        log.conv if is_log else conv_state, log.conv.stride(0) if is_log else 0,
        out, out.stride(0),
        channels, weight.shape[0], bias is not None, is_log,
        log.first_node - log.num_log_rows if is_log else 0, log.num_log_rows if is_log else 0,
        _BLOCK,
        num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    x, x_stride, weight, bias, slots, rows, num_log_rows, conv_state, columns, columns_stride,
    out, out_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LOG: tl.constexpr,
    FIRST_ROW: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    out += token * out_stride + c
    slot = tl.load(slots + token).to(tl.int64)
    if slot == 0:
        store(out, tl.zeros([BLOCK], tl.float32), mask)
        return
    window = conv_state + slot * ((WIDTH - 1) * C) + c
    newest = load32(x + token * x_stride + c, mask)
    total = newest * load32(weight + (WIDTH - 1) * C + c, mask)
    if HAS_BIAS:
        total += load32(bias + c, mask)
    if IS_LOG:
        count = tl.load(num_log_rows + token)
        columns += tl.load(rows + token).to(tl.int64) * columns_stride + FIRST_ROW * C + c
        for j in tl.static_range(WIDTH - 1):
            behind = count + j - (WIDTH - 1)
            column = load32(window + (count + j) * C, mask & (behind < 0))
            column += load32(columns + behind * C, mask & (behind >= 0))
            total += column * load32(weight + j * C + c, mask)
        store(columns + count * C, newest, mask & (count < R))
    else:
        for j in tl.static_range(WIDTH - 1):
            column = load32(window + j * C, mask)
            total += column * load32(weight + j * C + c, mask)
            if j > 0:
                store(window + (j - 1) * C, column, mask)
        store(window + (WIDTH - 2) * C, newest, mask)
    store(out, silu(total), mask)

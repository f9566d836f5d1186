"""One decode step of a gated delta net in three launches: what is ready first, recurrence, norm.

Owns: ``prepared_step_``, and the launch before the recurrence: convolution, gates, windows (or raw
columns of a log). Does not know: which way of stepping is faster (``triton_table.py``).

The recurrence is then a pure stream over states, at the price of two launches.

Invariants: those of ``triton.py`` and ``triton_log.py``; one program reads and moves all windows of
a key head's channels.
Read next: ``../tree_recurrence/triton_step.py`` (the recurrence).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_net.triton_parts import (
    PackedMixer,
    StepScratch,
    convolved,
    convolved_by_log,
    gates,
    pair_channels,
    shift_,
    unit,
)
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.tree_recurrence import triton_step
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import launch, load32, power_of_two, store
from hyradix.kernels.triton_table import StepConfig


def prepared_step_(
    projected: torch.Tensor,
    weights: PackedMixer,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: StepScratch,
    out: torch.Tensor,
    config: StepConfig,
    *,
    rows: torch.Tensor | None = None,
    num_log_rows: torch.Tensor | None = None,
    log: SpecLayer | None = None,
) -> torch.Tensor:
    """As ``triton.step_``, or with a log as ``triton_log.log_step_``. ``scratch`` has a k_dim."""
    n, (_, num_v_heads, dk, dv) = projected.shape[0], state.shape
    channels, is_log = conv_state.shape[2], log is not None
    x = scratch.inputs
    columns = log.conv if is_log else conv_state
    launch(
        _prepare_kernel,
        (n, weights.num_k_heads),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias, slots,
        rows if is_log else slots, num_log_rows if is_log else slots, conv_state,
        columns, columns.stride(0), x.q, x.k, x.v, x.g, x.beta,
        channels, weights.num_k_heads, num_v_heads // weights.num_k_heads, dk, dv,
        conv_state.shape[1] + 1, log.num_log_rows if is_log else 0,
        log.first_node - log.num_log_rows if is_log else 0, power_of_two(dk), power_of_two(dv),
        is_log,
        num_warps=2,
    )  # fmt: skip
    token = tuple(part[:n] for part in (x.q, x.k, x.v, x.g, x.beta))
    o = scratch.o[:n]
    if is_log:
        triton_step.log_step_(GDN, *token, slots, rows, num_log_rows, state, log, o, config=config)
    else:
        triton_step.step_(GDN, *token, slots, state, o, config=config)
    z = projected[:, channels : channels + num_v_heads * dv].unflatten(1, (num_v_heads, dv))
    gated_rms_norm(o, z, weights.norm, weights.eps, out.unflatten(1, (num_v_heads, dv)))
    return out


@triton.jit
def _prepare_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, slots, rows, num_log_rows,
    conv_state, columns, columns_stride, all_q, all_k, all_v, all_g, all_beta,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, FIRST_ROW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, IS_LOG: tl.constexpr,
):  # fmt: skip
    """One token and key head; a padded row's inputs are not read."""
    HV: tl.constexpr = HK * RATIO
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot == 0:
        return
    x = projected + row * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    count = tl.load(num_log_rows + row)
    if IS_LOG:
        columns += tl.load(rows + row).to(tl.int64) * columns_stride + FIRST_ROW * CHANNELS
    d, c = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < DK, c < DV
    channel, mask = pair_channels(head, d, in_k, HK, DK)
    if IS_LOG:
        qk = convolved_by_log(x, window, columns, count, conv_w, channel, mask, CHANNELS, WIDTH)
        store(columns + count * CHANNELS + channel, load32(x + channel, mask), mask & (count < R))
    else:
        qk = convolved(x, window, CHANNELS, conv_w, channel, mask, CHANNELS, WIDTH)
        shift_(window, x, channel, mask, CHANNELS, WIDTH)
    q, k = tl.split(unit(qk))
    tl.store(all_q + (row * HK + head) * DK + d, q * (DK**-0.5), mask=in_k)
    tl.store(all_k + (row * HK + head) * DK + d, k, mask=in_k)
    for i in tl.static_range(RATIO):
        v_head = head * RATIO + i
        channel = 2 * HK * DK + v_head * DV + c
        if IS_LOG:
            v = convolved_by_log(x, window, columns, count, conv_w, channel, in_v, CHANNELS, WIDTH)
            own = load32(x + channel, in_v)
            store(columns + count * CHANNELS + channel, own, in_v & (count < R))
        else:
            v = convolved(x, window, CHANNELS, conv_w, channel, in_v, CHANNELS, WIDTH)
            shift_(window, x, channel, in_v, CHANNELS, WIDTH)
        g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
        tl.store(all_v + (row * HV + v_head) * DV + c, v, mask=in_v)
        tl.store(all_g + row * HV + v_head, g)
        tl.store(all_beta + row * HV + v_head, beta)

"""One decode step of a gated delta net in two or three launches: what is ready first, the states.

Owns: ``prepared_step_``, and the launch before the states are read: convolution, gates, windows (or
raw columns, keys and decays of a log). Does not know: which way of stepping is faster
(``triton_table.py``).

The launch that reads states, and a log's rows, is then a pure stream; the norm is its last lines
where a program holds a whole head, else a launch of its own.

Invariants: those of ``triton.py`` and ``triton_log.py``; one program reads and moves all windows of
a key head's channels.
Read next: ``../tree_recurrence/triton_stream.py`` (the launch that follows).
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
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_stream import OutputNorm, stream_
from hyradix.kernels.triton_support import (
    issue_loads,
    launch,
    load32,
    power_of_two,
    store,
    wait_for_previous,
)
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
    """As ``triton.step_``, or with a log as ``triton_log.log_step_``."""
    n, (_, num_v_heads, dk, dv) = projected.shape[0], state.shape
    channels, is_log = conv_state.shape[2], log is not None
    x, ratio = scratch.inputs, num_v_heads // weights.num_k_heads
    columns = log.conv if is_log else conv_state
    launch(
        _prepare_kernel,
        (n, weights.num_k_heads),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias, slots,
        rows if is_log else slots, num_log_rows if is_log else slots, conv_state,
        columns, columns.stride(0), log.k if is_log else x.k, log.k.stride(0) if is_log else 0,
        log.g if is_log else x.decay, log.g.stride(0) if is_log else 0,
        x.q, x.k, x.qk, x.v, x.decay, x.beta,
        channels, weights.num_k_heads, ratio, dk, dv,
        conv_state.shape[1] + 1, log.num_log_rows if is_log else 0,
        log.first_node - log.num_log_rows if is_log else 0, power_of_two(dk), power_of_two(dv),
        power_of_two(ratio), is_log,
        num_warps=2, is_chained=True,
    )  # fmt: skip
    z = projected[:, channels : channels + num_v_heads * dv]
    holds_head = config.block_v >= dv
    norm = OutputNorm(z, weights.norm, weights.eps) if holds_head else None
    o = out if holds_head else scratch.o[:n].flatten(1)
    stream_(
        x, slots, state, o, config, has_rows=True, norm=norm, rows=rows,
        num_log_rows=num_log_rows, log=log,
    )  # fmt: skip
    if not holds_head:
        heads = (num_v_heads, dv)
        z, into = z.unflatten(1, heads), out.unflatten(1, heads)
        gated_rms_norm(o.unflatten(1, heads), z, weights.norm, weights.eps, into)
    return out


@triton.jit
def _prepare_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, slots, rows, num_log_rows,
    conv_state, columns, columns_stride, log_k, k_stride, log_g, g_stride,
    all_q, all_k, all_qk, all_v, all_decay, all_beta,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, FIRST_ROW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, IS_LOG: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One token and key head, its value heads at once; a padded row's inputs are not read."""
    HV: tl.constexpr = HK * RATIO
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    log_row = tl.load(rows + row).to(tl.int64)
    count = tl.load(num_log_rows + row)
    issue_loads()
    x = projected + row * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    d, c, h = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BH)
    v_head = tl.minimum(head * RATIO + h, HV - 1)  # of what is padding something valid is read
    in_k, in_h = d < DK, h < RATIO
    in_v = in_h[:, None] & (c < DV)[None, :]
    v_column = v_head[:, None] * DV + c[None, :]
    v_channel = 2 * HK * DK + v_column
    channel, mask = pair_channels(head, d, in_k, HK, DK)
    wait_for_previous(CHAINED)
    if slot == 0:
        return
    if IS_LOG:
        columns += log_row * columns_stride + FIRST_ROW * CHANNELS
        v = convolved_by_log(x, window, columns, count, conv_w, v_channel, in_v, CHANNELS, WIDTH)
        issue_loads()
        qk = convolved_by_log(x, window, columns, count, conv_w, channel, mask, CHANNELS, WIDTH)
    else:
        v = convolved(x, window, CHANNELS, conv_w, v_channel, in_v, CHANNELS, WIDTH)
        issue_loads()
        qk = convolved(x, window, CHANNELS, conv_w, channel, mask, CHANNELS, WIDTH)
    g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
    issue_loads()
    q, k = tl.split(unit(qk))
    q *= DK**-0.5
    k_place, v_place = (row * HK + head) * DK + d, row * (HV * DV) + v_column
    tl.store(all_q + k_place, q, mask=in_k)
    tl.store(all_k + k_place, k, mask=in_k)
    tl.store(all_qk + row * HK + head, tl.sum(q * k, 0))
    tl.store(all_beta + row * HV + v_head, beta, mask=in_h)
    tl.store(all_v + v_place, v, mask=in_v)
    tl.store(all_decay + row * HV + v_head, tl.exp(g), mask=in_h)
    if IS_LOG:
        fits = count < R
        tl.store(log_k + log_row * k_stride + (count * HK + head) * DK + d, k, mask=in_k & fits)
        tl.store(log_g + log_row * g_stride + count * HV + v_head, g, mask=in_h & fits)
        own = columns + count * CHANNELS
        store(own + channel, load32(x + channel, mask), mask & fits)
        store(own + v_channel, load32(x + v_channel, in_v), in_v & fits)
    else:
        shift_(window, x, channel, mask, CHANNELS, WIDTH)
        shift_(window, x, v_channel, in_v, CHANNELS, WIDTH)

"""One decode step of a gated delta net in two or three launches: what is ready first, the states.

Owns: ``prepared_step_``, and the launch before the states are read: convolution, gates, windows (or
raw columns of a log), and all that a log's rows add to what is read of a state. Does not know:
which way of stepping is faster (``triton_table.py``).

The launch that reads states is then a pure stream; the norm is its last lines where a program holds
a whole head, else a launch of its own.

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
    two_sums,
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
    arrays = (log.k, log.u, log.g) if is_log else (x.k, x.v, x.decay)
    launch(
        _prepare_kernel,
        (n, weights.num_k_heads),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias, slots,
        rows if is_log else slots, num_log_rows if is_log else slots, conv_state,
        columns, columns.stride(0), arrays[0], arrays[0].stride(0), arrays[1], arrays[1].stride(0),
        arrays[2], arrays[2].stride(0), x.q, x.k, x.qk, x.v, x.o, x.decay, x.beta,
        channels, weights.num_k_heads, ratio, dk, dv,
        conv_state.shape[1] + 1, log.num_log_rows if is_log else 0,
        log.first_node - log.num_log_rows if is_log else 0, power_of_two(dk), power_of_two(dv),
        power_of_two(ratio), power_of_two(log.num_log_rows) if is_log else 1, is_log,
        num_warps=config.prepare_warps, is_chained=True,
    )  # fmt: skip
    z = projected[:, channels : channels + num_v_heads * dv]
    holds_head = config.block_v >= dv
    norm = OutputNorm(z, weights.norm, weights.eps) if holds_head else None
    o = out if holds_head else scratch.o[:n].flatten(1)
    stream_(
        x, slots, state, o, config, norm=norm, rows=rows, num_log_rows=num_log_rows, log=log
    )  # fmt: skip
    if not holds_head:
        heads = (num_v_heads, dv)
        z, into = z.unflatten(1, heads), out.unflatten(1, heads)
        gated_rms_norm(o.unflatten(1, heads), z, weights.norm, weights.eps, into)
    return out


@triton.jit
def _prepare_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, slots, rows, num_log_rows,
    conv_state, columns, columns_stride, log_k, k_stride, log_u, u_stride, log_g, g_stride,
    all_q, all_k, all_qk, all_v, all_o, all_decay, all_beta,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, FIRST_ROW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, IS_LOG: tl.constexpr,
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
    d, c, h, j = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BH), tl.arange(0, BR)
    v_head = tl.minimum(head * RATIO + h, HV - 1)  # of what is padding something valid is read
    in_k, in_h, is_row = d < DK, h < RATIO, j < count
    in_v = in_h[:, None] & (c < DV)[None, :]
    v_column = v_head[:, None] * DV + c[None, :]
    v_channel = 2 * HK * DK + v_column
    channel, mask = pair_channels(head, d, in_k, HK, DK)
    if IS_LOG:
        columns += log_row * columns_stride + FIRST_ROW * CHANNELS
        log_k += log_row * k_stride + head * DK + d
        log_u += log_row * u_stride
        log_g += log_row * g_stride + v_head
        is_row &= slot != 0
        keys = load32(log_k + j[:, None] * (HK * DK), is_row[:, None] & in_k[None, :])
        place_u = log_u + (j[:, None, None] * (HV * DV) + v_column[None, :, :])
        us = load32(place_u, is_row[:, None, None] & in_v[None, :, :])
        row_g = load32(log_g[None, :] + j[:, None] * HV, is_row[:, None] & in_h[None, :])
        issue_loads()
    wait_for_previous(CHAINED)
    if slot == 0:
        return
    if IS_LOG:
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
    if IS_LOG:
        # from each row on, the sum of the rows behind it: no difference
        is_later = j[None, :, None] > j[:, None, None]
        from_row = tl.exp(tl.sum(tl.where(is_later, row_g[None, :, :], 0.0), 1) + g[None, :])
        at_k, at_q = two_sums(keys, k[None, :], q[None, :], 1)
        at_k, at_q = at_k[:, None] * from_row, at_q[:, None] * from_row
        row_k, row_q = two_sums(us, at_k[:, :, None], at_q[:, :, None], 0)
        tl.store(all_v + v_place, v - row_k, mask=in_v)
        tl.store(all_o + v_place, row_q, mask=in_v)
        tl.store(all_decay + row * HV + v_head, tl.exp(tl.sum(row_g, 0) + g), mask=in_h)
        fits = count < R
        tl.store(log_k + count * (HK * DK), k, mask=in_k & fits)
        tl.store(log_g + count * HV, g, mask=in_h & fits)
        own = columns + count * CHANNELS
        store(own + channel, load32(x + channel, mask), mask & fits)
        store(own + v_channel, load32(x + v_channel, in_v), in_v & fits)
    else:
        tl.store(all_v + v_place, v, mask=in_v)
        tl.store(all_decay + row * HV + v_head, tl.exp(g), mask=in_h)
        shift_(window, x, channel, mask, CHANNELS, WIDTH)
        shift_(window, x, v_channel, in_v, CHANNELS, WIDTH)

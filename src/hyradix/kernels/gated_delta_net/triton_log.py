"""One decode step of a gated delta net that only reads its base: the log grows by one row.

Owns: the step of ``triton.py`` with base + log instead of a state in place. Does not know: when
logs are folded (``tree_recurrence/triton_fold.py``), who counts the rows.

o = q^T (D(G) S_0 + sum over rows j of D(G - G_j) k_j u_j^T), and u likewise: DESIGN section 6.1.

Invariants:
- Bases and their windows are not written. Row ``num_log_rows[n]`` of the log is, and its raw
  column; the count itself stays (all layers read it; the runner adds 1 behind the last).
- Everything that is folded later (k, u, g) is float32, by float32 sums.
- Decays are sums of g from a row to the end, never differences of sums from the base.
Read next: ``triton_parts.py``; ``tree_recurrence/masked.py`` is the readable twin (one node).
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
    convolved_by_log,
    gated_norm,
    gates,
    is_last,
    norm_heads,
    pair_channels,
    unit,
)
from hyradix.kernels.gated_delta_net.triton_prepared import prepared_step_
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import (
    ceil_div,
    issue_loads,
    launch,
    load32,
    power_of_two,
    store,
    two_sums,
    wait_for_previous,
)
from hyradix.kernels.triton_table import StepConfig, step_config


def log_step_(
    projected: torch.Tensor,
    weights: PackedMixer,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_log_rows: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    log: SpecLayer,
    scratch: StepScratch,
    out: torch.Tensor,
    *,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """One token of each row from base and log: append its row, write its output.

    Args:
        projected, conv_state, state, out: as in ``triton.step_``. slots: ``int32[N]`` bases, 0
            where a row is padding. rows: ``int32[N]`` of the log's arrays. num_log_rows:
            ``int32[N]`` valid rows before this token, under R (at R nothing is appended). log: mode
            ``log``, any R (and nodes behind it).

    Returns: out.
    """
    num_tokens = projected.shape[0]
    _, num_v_heads, dk, dv = state.shape
    assert state.is_contiguous()
    assert conv_state.is_contiguous()
    assert projected.stride(1) == out.stride(1) == 1
    config = config or step_config(state.device, num_tokens, is_log=True)
    if not config.is_fused:
        return prepared_step_(
            projected, weights, slots, conv_state, state, scratch, out, config,
            rows=rows, num_log_rows=num_log_rows, log=log,
        )  # fmt: skip
    ratio = num_v_heads // weights.num_k_heads
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ceil_div(dv, block_v)
    launch(
        _log_step_kernel,
        (num_tokens * num_v_heads * blocks,),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        weights.norm, weights.eps, slots, rows, num_log_rows, conv_state, state,
        log.k, log.k.stride(0), log.u, log.u.stride(0), log.g, log.g.stride(0),
        log.conv, log.conv.stride(0), scratch.o, scratch.counters, out, out.stride(0),
        conv_state.shape[2], weights.num_k_heads, ratio, dk, dv, conv_state.shape[1] + 1,
        log.num_log_rows, log.first_node - log.num_log_rows, power_of_two(dk), block_v,
        power_of_two(dv), power_of_two(log.num_log_rows), blocks,
        num_warps=config.num_warps, is_chained=True,
    )  # fmt: skip
    return out


@triton.jit
def _log_step_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, norm, eps, slots, rows, num_log_rows,
    conv_state, state, log_k, k_stride, log_u, u_stride, log_g, g_stride, log_conv, conv_stride,
    o, counters, out, out_stride,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, FIRST_ROW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BDV: tl.constexpr, BR: tl.constexpr,
    BLOCKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    HV: tl.constexpr = HK * RATIO
    block = tl.program_id(0) % BLOCKS
    v_head = tl.program_id(0) // BLOCKS % HV
    head = v_head // RATIO
    row = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    log_row = tl.load(rows + row).to(tl.int64)
    count = tl.load(num_log_rows + row)
    issue_loads()
    d, j, column = tl.arange(0, BK), tl.arange(0, BR), block * BV + tl.arange(0, BV)
    in_k, is_row, in_v = d < DK, (j < count) & (slot != 0), column < DV
    v_column = v_head * DV + column
    out += row * out_stride
    state += ((slot * HV + v_head) * DK + d[:, None]) * DV + column[None, :]
    base = load32(state, in_k[:, None] & in_v[None, :] & (slot != 0))
    issue_loads()
    log_k += log_row * k_stride + head * DK + d
    log_u += log_row * u_stride + v_column
    log_g += log_row * g_stride + v_head
    log_conv += log_row * conv_stride + FIRST_ROW * CHANNELS
    keys = load32(log_k + j[:, None] * (HK * DK), is_row[:, None] & in_k[None, :])
    us = load32(log_u + j[:, None] * (HV * DV), is_row[:, None] & in_v[None, :])
    row_g = load32(log_g + j * HV, is_row)
    issue_loads()
    wait_for_previous(CHAINED)
    if slot == 0:
        store(out + v_column, tl.zeros([BV], tl.float32), in_v)
        return
    x = projected + row * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    qk_channel, qk_mask = pair_channels(head, d, in_k, HK, DK)
    v_channel = 2 * HK * DK + v_column
    v = convolved_by_log(x, window, log_conv, count, conv_w, v_channel, in_v, CHANNELS, WIDTH)
    g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
    z, weight = load32(x + CHANNELS + v_column, in_v), load32(norm + column, in_v)
    issue_loads()
    qk = convolved_by_log(x, window, log_conv, count, conv_w, qk_channel, qk_mask, CHANNELS, WIDTH)

    q, k = tl.split(unit(qk))
    q *= DK**-0.5
    after = tl.sum(tl.where(j[None, :] > j[:, None], row_g[None, :], 0.0), 1)
    from_row = tl.where(is_row, tl.exp(g + after), 0.0)
    from_base = tl.exp(g + tl.sum(row_g, 0))
    at_k, at_q = two_sums(keys, k[None, :], q[None, :], 1)
    row_k, row_q = two_sums(us, (at_k * from_row)[:, None], (at_q * from_row)[:, None], 0)
    base_k, base_q = two_sums(base, k[:, None], q[:, None], 0)
    u = beta * (v - (from_base * base_k + row_k))
    value = from_base * base_q + row_q + tl.sum(q * k, 0) * u
    fits = count < R
    store(log_u + count * (HV * DV), u, in_v & fits)
    own = log_conv + count * CHANNELS
    store(own + v_channel, load32(x + v_channel, in_v), in_v & fits)
    tl.store(log_g + count * HV, g, mask=fits & (block == 0))
    is_first = fits & (block == 0) & (v_head % RATIO == 0)
    store(log_k + count * (HK * DK), k, in_k & is_first)
    store(own + qk_channel, load32(x + qk_channel, qk_mask), qk_mask & is_first)
    if BLOCKS == 1:
        store(out + v_column, gated_norm(value, z, weight, eps, DV), in_v)
    else:
        o += row * (HV * DV)
        tl.store(o + v_column, value, mask=in_v)
        if is_last(counters + row * HK + head, RATIO * BLOCKS):
            norm_heads(o, x, norm, eps, out, head, CHANNELS, RATIO, DV, BDV)

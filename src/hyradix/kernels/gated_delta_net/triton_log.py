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
    gated_norm,
    gates,
    is_last,
    unit,
    zero_heads,
)
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import divisor, launch, load32, power_of_two, silu, store
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
    ratio = num_v_heads // weights.num_k_heads
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ratio * triton.cdiv(dv, block_v)
    splits = divisor(blocks, config.splits)
    launch(
        _log_step_kernel,
        (num_tokens * weights.num_k_heads * splits,),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        weights.norm, weights.eps, slots, rows, num_log_rows, conv_state, state,
        log.k, log.k.stride(0), log.u, log.u.stride(0), log.g, log.g.stride(0),
        log.conv, log.conv.stride(0), scratch.o, scratch.counters, out, out.stride(0),
        conv_state.shape[2], weights.num_k_heads, ratio, dk, dv, conv_state.shape[1] + 1,
        log.num_log_rows, log.first_node - log.num_log_rows, power_of_two(dk), block_v,
        power_of_two(dv), power_of_two(log.num_log_rows), blocks, splits, config.stages,
        num_warps=config.num_warps,
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
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(0) // SPLITS % HK
    row = (tl.program_id(0) // (SPLITS * HK)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    out_row = out + row * out_stride
    if slot == 0:
        if split == 0:
            zero_heads(out_row, head * RATIO, RATIO, DV, BDV)
        return
    HV: tl.constexpr = HK * RATIO
    x = projected + row * projected_stride
    log_row = tl.load(rows + row).to(tl.int64)
    count = tl.load(num_log_rows + row)
    fits = count < R
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    log_k += log_row * k_stride + head * DK
    log_u += log_row * u_stride
    log_g += log_row * g_stride
    log_conv += log_row * conv_stride + FIRST_ROW * CHANNELS

    d, j = tl.arange(0, BK), tl.arange(0, BR)
    in_k, is_row = d < DK, j < count
    q_channel, k_channel = head * DK + d, (HK + head) * DK + d
    q = _convolved(x, window, log_conv, count, conv_w, q_channel, in_k, CHANNELS, WIDTH)
    k = _convolved(x, window, log_conv, count, conv_w, k_channel, in_k, CHANNELS, WIDTH)
    q, k = unit(q) * (DK**-0.5), unit(k)
    if (split == 0) & fits:
        store(log_k + count * (HK * DK) + d, k, in_k)
        store(log_conv + count * CHANNELS + q_channel, load32(x + q_channel, in_k), in_k)
        store(log_conv + count * CHANNELS + k_channel, load32(x + k_channel, in_k), in_k)
    keys = load32(log_k + j[:, None] * (HK * DK) + d[None, :], is_row[:, None] & in_k[None, :])
    k_keys, q_keys = tl.sum(keys * k[None, :], 1), tl.sum(keys * q[None, :], 1)
    qk = tl.sum(q * k, 0)

    for i in tl.range(split * (BLOCKS // SPLITS), (split + 1) * (BLOCKS // SPLITS),
                      num_stages=STAGES):  # fmt: skip
        v_head = head * RATIO + i // (BLOCKS // RATIO)
        column = i % (BLOCKS // RATIO) * BV + tl.arange(0, BV)
        in_v = column < DV
        inside = in_k[:, None] & in_v[None, :]
        place = ((slot * HV + v_head) * DK + d[:, None]) * DV + column[None, :]
        base = tl.load(state + place, mask=inside, other=0.0)
        g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
        v_channel = 2 * HK * DK + v_head * DV + column
        v = _convolved(x, window, log_conv, count, conv_w, v_channel, in_v, CHANNELS, WIDTH)
        row_g = load32(log_g + j * HV + v_head, is_row)
        from_row = g + tl.sum(tl.where(j[None, :] > j[:, None], row_g[None, :], 0.0), 1)
        from_base = tl.exp(g + tl.sum(row_g, 0))
        ratio = tl.where(is_row, tl.exp(from_row), 0.0)
        us = load32(
            log_u + (j[:, None] * HV + v_head) * DV + column[None, :],
            is_row[:, None] & in_v[None, :],
        )
        read_k = from_base * tl.sum(base * k[:, None], 0)
        read_q = from_base * tl.sum(base * q[:, None], 0)
        read_k += tl.sum(us * (k_keys * ratio)[:, None], 0)
        read_q += tl.sum(us * (q_keys * ratio)[:, None], 0)
        u = beta * (v - read_k)
        o_place = (row * HV + v_head) * DV + column
        tl.store(o + o_place, read_q + qk * u, mask=in_v)
        if fits:
            store(log_u + (count * HV + v_head) * DV + column, u, in_v)
            tl.store(log_g + count * HV + v_head, g)
            store(log_conv + count * CHANNELS + v_channel, load32(x + v_channel, in_v), in_v)
    if is_last(counters + row * HK + head, SPLITS):
        for h in tl.static_range(RATIO):
            v_head = head * RATIO + h
            o_head = o + (row * HV + v_head) * DV
            gated_norm(o_head, x, norm, eps, out_row, v_head, CHANNELS, DV, BDV)


@triton.jit
def _convolved(
    x, window, log_conv, count, weight, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """As ``triton_parts.convolved``; the newest earlier columns are the log's, the rest the base's.

    Column j of the WIDTH - 1 before the token is column count + j of (window, then log).
    """
    total = load32(x + channel, mask) * load32(weight + (WIDTH - 1) * CHANNELS + channel, mask)
    for j in tl.static_range(WIDTH - 1):
        behind = count + j - (WIDTH - 1)
        of_base = load32(window + (count + j) * CHANNELS + channel, mask & (behind < 0))
        of_log = load32(log_conv + behind * CHANNELS + channel, mask & (behind >= 0))
        column = of_base + of_log
        total += column * load32(weight + j * CHANNELS + channel, mask)
    return silu(total)

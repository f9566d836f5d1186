"""One decode step of a gated delta net in one launch, states in place by slot.

Owns: convolution, norms of q and k, gates, delta rule, gated norm, and the windows. Does not know:
projections, who owns a slot, prefill.

Invariants:
- States and windows change at the rows' slots only; slots differ (the sink apart).
- State and sums are float32; the projection and the output have the activations' type.
- A window is written by the last program of its key head, after all of them have read it.
- A state's block is the first thing that a program asks for and the last that it writes: all else
  is done while it comes.
Read next: ``triton_parts.py``; ``reference.py`` is the readable twin.
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
    gated_norm,
    gates,
    is_last,
    norm_heads,
    pair_channels,
    shift_,
    unit,
)
from hyradix.kernels.gated_delta_net.triton_prepared import prepared_step_
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


def step_(
    projected: torch.Tensor,
    weights: PackedMixer,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: StepScratch,
    out: torch.Tensor,
    *,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """One token of each row: update its slot's window and state, write its output.

    Args:
        projected: ``[N, C + Hv dv + 2 Hv]``: q k v, then z, b, a. slots: ``int32[N]`` or int64, 0
            where a row is padding. conv_state: ``[slots, K-1, C]``. state: ``float32[slots, Hv,
            dk, dv]``. Both contiguous. out: ``[N, Hv dv]``.

    Returns: out.
    """
    num_rows = projected.shape[0]
    _, num_v_heads, dk, dv = state.shape
    assert state.is_contiguous()
    assert conv_state.is_contiguous()
    assert projected.stride(1) == out.stride(1) == 1
    config = config or step_config(state.device, num_rows, is_log=False)
    if not config.is_fused:
        return prepared_step_(projected, weights, slots, conv_state, state, scratch, out, config)
    ratio = num_v_heads // weights.num_k_heads
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ceil_div(dv, block_v)
    launch(
        _step_kernel,
        (num_rows * num_v_heads * blocks,),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        weights.norm, weights.eps, slots, conv_state, state, scratch.o, scratch.counters,
        out, out.stride(0),
        conv_state.shape[2], weights.num_k_heads, ratio, dk, dv, conv_state.shape[1] + 1,
        power_of_two(dk), block_v, power_of_two(dv), blocks,
        num_warps=config.num_warps, is_chained=True,
    )  # fmt: skip
    return out


@triton.jit
def _step_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, norm, eps, slots, conv_state, state,
    o, counters, out, out_stride,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BDV: tl.constexpr,
    BLOCKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    HV: tl.constexpr = HK * RATIO
    block = tl.program_id(0) % BLOCKS
    v_head = tl.program_id(0) // BLOCKS % HV
    head = v_head // RATIO
    row = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    d, column = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    in_k, in_v = d < DK, column < DV
    v_column = v_head * DV + column
    out += row * out_stride
    state += ((slot * HV + v_head) * DK + d[:, None]) * DV + column[None, :]
    base = load32(state, in_k[:, None] & in_v[None, :] & (slot != 0))
    issue_loads()
    wait_for_previous(CHAINED)
    if slot == 0:
        store(out + v_column, tl.zeros([BV], tl.float32), in_v)
        return
    x = projected + row * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    qk_channel, qk_mask = pair_channels(head, d, in_k, HK, DK)
    v_channel = 2 * HK * DK + v_column
    v = convolved(x, window, CHANNELS, conv_w, v_channel, in_v, CHANNELS, WIDTH)
    g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
    z, weight = load32(x + CHANNELS + v_column, in_v), load32(norm + column, in_v)
    issue_loads()
    qk = convolved(x, window, CHANNELS, conv_w, qk_channel, qk_mask, CHANNELS, WIDTH)
    q, k = tl.split(unit(qk))
    q, kept = q * (DK**-0.5), tl.exp(g)
    read_k, read_q = two_sums(base, k[:, None], q[:, None], 0)
    u = beta * (v - kept * read_k)
    value = kept * read_q + tl.sum(q * k, 0) * u
    new = base * kept + k[:, None] * u[None, :]
    counter = counters + row * HK + head
    if BLOCKS == 1:
        # before the state is written: the count waits for what was written, and need not for that
        last = is_last(counter, RATIO)
        store(out + v_column, gated_norm(value, z, weight, eps, DV), in_v)
    else:
        o += row * (HV * DV)
        tl.store(o + v_column, value, mask=in_v)
        last = is_last(counter, RATIO * BLOCKS)
    store(state, new, in_k[:, None] & in_v[None, :])
    if last:
        if BLOCKS > 1:
            norm_heads(o, x, norm, eps, out, head, CHANNELS, RATIO, DV, BDV)
        shift_(window, x, qk_channel, qk_mask, CHANNELS, WIDTH)
        for i in tl.static_range(RATIO):
            channel = 2 * HK * DK + (head * RATIO + i) * DV + tl.arange(0, BDV)
            shift_(window, x, channel, tl.arange(0, BDV) < DV, CHANNELS, WIDTH)

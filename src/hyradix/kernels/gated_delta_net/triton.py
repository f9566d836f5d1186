"""One decode step of a gated delta net in one launch, states in place by slot.

Owns: convolution, norms of q and k, gates, delta rule, gated norm, and the windows. Does not know:
projections, who owns a slot, prefill.

Invariants:
- States and windows change at the rows' slots only; slots differ (the sink apart).
- State and sums are float32; the projection and the output have the activations' type.
- A window is written by the last split of its key head, after all of them have read it.
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
    unit,
    zero_heads,
)
from hyradix.kernels.triton_support import divisor, launch, load32, power_of_two, store
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
    ratio = num_v_heads // weights.num_k_heads
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ratio * triton.cdiv(dv, block_v)
    splits = divisor(blocks, config.splits)
    launch(
        _step_kernel,
        (num_rows * weights.num_k_heads * splits,),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        weights.norm, weights.eps, slots, conv_state, state, scratch.o, scratch.counters,
        out, out.stride(0),
        conv_state.shape[2], weights.num_k_heads, ratio, dk, dv, conv_state.shape[1] + 1,
        power_of_two(dk), block_v, power_of_two(dv), blocks, splits, config.stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _step_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, norm, eps, slots, conv_state, state,
    o, counters, out, out_stride,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BDV: tl.constexpr,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCKS column blocks of BV belong to a key head: those of its RATIO value heads."""
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(0) // SPLITS % HK
    row = (tl.program_id(0) // (SPLITS * HK)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    out_row = out + row * out_stride
    if slot == 0:
        if split == 0:
            zero_heads(out_row, head * RATIO, RATIO, DV, BDV)
        return
    x = projected + row * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    d = tl.arange(0, BK)
    in_k = d < DK
    q_channel, k_channel = head * DK + d, (HK + head) * DK + d
    q = unit(convolved(x, window, CHANNELS, conv_w, q_channel, in_k, CHANNELS, WIDTH))
    k = unit(convolved(x, window, CHANNELS, conv_w, k_channel, in_k, CHANNELS, WIDTH))
    q = q * (DK**-0.5)
    for i in tl.range(split * (BLOCKS // SPLITS), (split + 1) * (BLOCKS // SPLITS),
                      num_stages=STAGES):  # fmt: skip
        v_head = head * RATIO + i // (BLOCKS // RATIO)
        column = i % (BLOCKS // RATIO) * BV + tl.arange(0, BV)
        in_v = column < DV
        place = ((slot * (HK * RATIO) + v_head) * DK + d[:, None]) * DV + column[None, :]
        inside = in_k[:, None] & in_v[None, :]
        g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HK * RATIO, DV)
        v_channel = 2 * HK * DK + v_head * DV + column
        v = convolved(x, window, CHANNELS, conv_w, v_channel, in_v, CHANNELS, WIDTH)
        decayed = tl.load(state + place, mask=inside, other=0.0) * tl.exp(g)
        u = beta * (v - tl.sum(decayed * k[:, None], 0))
        new = decayed + k[:, None] * u[None, :]
        tl.store(state + place, new, mask=inside)
        o_place = (row * (HK * RATIO) + v_head) * DV + column
        tl.store(o + o_place, tl.sum(new * q[:, None], 0), mask=in_v)
    if is_last(counters + row * HK + head, SPLITS):
        for h in tl.static_range(RATIO):
            v_head = head * RATIO + h
            o_head = o + (row * (HK * RATIO) + v_head) * DV
            gated_norm(o_head, x, norm, eps, out_row, v_head, CHANNELS, DV, BDV)
            v_channel = 2 * HK * DK + v_head * DV + tl.arange(0, BDV)
            _shift(window, x, v_channel, tl.arange(0, BDV) < DV, CHANNELS, WIDTH)
        _shift(window, x, q_channel, in_k, CHANNELS, WIDTH)
        _shift(window, x, k_channel, in_k, CHANNELS, WIDTH)


@triton.jit
def _shift(window, x, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The window moves on by one column; a channel is read and written by one thread."""
    for j in tl.static_range(WIDTH - 2):
        later = load32(window + (j + 1) * CHANNELS + channel, mask)
        store(window + j * CHANNELS + channel, later, mask)
    store(window + (WIDTH - 2) * CHANNELS + channel, load32(x + channel, mask), mask)

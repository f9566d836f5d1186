"""The mixer of a gated delta net over many tokens on the GPU: convolution, gates, chunks, norm.

Owns: ``mix_`` and its fused convolution and gates. Does not know: projections, draft trees.

Invariants:
- Old windows are read by the first launch and replaced by the last but one.
- States and windows are exact at every save; only the named slots change (the sink never).
Read next: ``reference.py`` (the readable twin), ``../gated_delta_rule/triton.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.causal_conv.triton_ragged import move_windows_
from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, gates, unit
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch, chunked_
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.triton_support import launch, load32, power_of_two, silu
from hyradix.kernels.triton_table import ChunkConfig


def mix_(
    projected: torch.Tensor,
    weights: PackedMixer,
    batch: DeviceStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: ChunkScratch,
    out: torch.Tensor,
    *,
    config: ChunkConfig | None = None,
) -> torch.Tensor:
    """Every sequence from its slot's state: out ``[T, Hv dv]``, slots and saves.

    Args as ``reference.mix``, on the device; tokens of no sequence stand at the end of projected
    and out, and are left out.
    """
    channels = conv_state.shape[2]
    _, num_v_heads, dk, dv = state.shape
    tokens, width = batch.sequences.shape[0], conv_state.shape[1] + 1
    assert projected.stride(1) == out.stride(1) == 1
    assert conv_state.is_contiguous()
    slots, x = batch.chunks.slots, scratch
    launch(
        _prepare_kernel,
        (tokens, weights.num_k_heads),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        batch.cu_seqlens, batch.sequences, slots, conv_state, x.q, x.k, x.v, x.g, x.beta,
        channels, weights.num_k_heads, num_v_heads // weights.num_k_heads, dk, dv, width,
        power_of_two(dk), power_of_two(dv),
        num_warps=1,
    )  # fmt: skip
    chunked_(batch.chunks, state, scratch, projected.dtype, config=config)
    move_windows_(projected, batch, conv_state)
    z = projected[:tokens, channels : channels + num_v_heads * dv].unflatten(1, (num_v_heads, dv))
    there = out[:tokens].unflatten(1, (num_v_heads, dv))
    gated_rms_norm(x.o[:tokens], z, weights.norm, weights.eps, there)
    return out


@triton.jit
def _prepare_kernel(
    projected, stride, conv_w, decay_rate, dt_bias, cu_seqlens, sequences, slots, conv_state,
    all_q, all_k, all_v, all_g, all_beta,
    CHANNELS: tl.constexpr, HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token and key head."""
    HV: tl.constexpr = HK * RATIO
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequences + token)
    before = token - tl.load(cu_seqlens + sequence)  # tokens of the sequence before this one
    window = conv_state + tl.load(slots + sequence).to(tl.int64) * ((WIDTH - 1) * CHANNELS)
    x = projected + token * stride
    d, c = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < DK, c < DV
    q_channel, k_channel = head * DK + d, (HK + head) * DK + d
    q = _convolved(x, stride, before, window, conv_w, q_channel, in_k, CHANNELS, WIDTH)
    k = _convolved(x, stride, before, window, conv_w, k_channel, in_k, CHANNELS, WIDTH)
    place = (token * HK + head) * DK + d
    tl.store(all_q + place, unit(q) * (DK**-0.5), mask=in_k)
    tl.store(all_k + place, unit(k), mask=in_k)
    for i in tl.static_range(RATIO):
        v_head = head * RATIO + i
        channel = 2 * HK * DK + v_head * DV + c
        v = _convolved(x, stride, before, window, conv_w, channel, in_v, CHANNELS, WIDTH)
        g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
        tl.store(all_v + (token * HV + v_head) * DV + c, v, mask=in_v)
        tl.store(all_g + token * HV + v_head, g)
        tl.store(all_beta + token * HV + v_head, beta)


@triton.jit
def _convolved(
    x, stride, before, window, weight, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """silu(convolution): earlier columns are earlier tokens, then the window's."""
    total = load32(x + channel, mask) * load32(weight + (WIDTH - 1) * CHANNELS + channel, mask)
    for j in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - j
        is_token = before >= back
        column = load32(x - back * stride + channel, mask & is_token)
        column += load32(window + (before + j) * CHANNELS + channel, mask & (before < back))
        total += column * load32(weight + j * CHANNELS + channel, mask)
    return silu(total)

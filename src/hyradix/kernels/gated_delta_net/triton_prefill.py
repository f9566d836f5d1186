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
from hyradix.kernels.gated_delta_net.reference import L2_EPS
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, gates
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch, chunked_
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.triton_halves import ONE, split
from hyradix.kernels.triton_support import ceil_div, launch, load32, power_of_two, quick_silu
from hyradix.kernels.triton_table import ChunkConfig

_L2_EPS = tl.constexpr(L2_EPS)
_TOKENS, _NUMBERS = 16, 2048
"""Tokens of a program of the first launch, where a tile of them has no more numbers than that."""


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
    slots, x, block_k, block_v = batch.chunks.slots, scratch, power_of_two(dk), power_of_two(dv)
    together = max(1, min(_TOKENS, _NUMBERS // max(block_k, block_v)))
    launch(
        _prepare_kernel,
        (2 * weights.num_k_heads + num_v_heads, ceil_div(tokens, together)),
        projected, projected.stride(0), tokens, weights.conv, weights.decay_rate, weights.dt_bias,
        batch.cu_seqlens, batch.sequences, slots, conv_state, *x.keys, x.v, x.g, x.beta,
        channels, weights.num_k_heads, num_v_heads, dk, dv, width, together, block_k, block_v,
        projected.dtype == torch.float32,
        num_warps=4,
    )  # fmt: skip
    there = out[:tokens].unflatten(1, (num_v_heads, dv))
    chunked_(batch.chunks, state, scratch, there, config=config)
    move_windows_(projected, batch, conv_state)
    z = projected[:tokens, channels : channels + num_v_heads * dv].unflatten(1, (num_v_heads, dv))
    gated_rms_norm(there, z, weights.norm, weights.eps, there)
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    projected, stride, num_tokens, conv_w, decay_rate, dt_bias, cu_seqlens, sequences, slots,
    conv_state, q_high, q_low, k_high, k_low, all_v, all_g, all_beta,
    CHANNELS: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head: heads of q come first, then of k, then of v. Neighbours read what
    stands side by side."""
    head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    token = tl.minimum(token, num_tokens - 1).to(tl.int64)  # of those beyond nothing is stored
    sequence = tl.load(sequences + token)
    before = (token - tl.load(cu_seqlens + sequence)).to(tl.int32)  # tokens of its own sequence
    slot = tl.load(slots + sequence).to(tl.int64)
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    is_kept = slot != 0  # padding starts from nothing
    x = projected + token * stride
    if head < 2 * HK:
        d = tl.arange(0, BK)[None, :]
        key = _convolved(
            x, stride, before, window, is_kept, conv_w, head * DK + d, d < DK, CHANNELS, WIDTH
        )
        key = key / tl.sqrt(tl.sum(key * key, 1) + _L2_EPS)[:, None]
        place, mask = ((token * HK + head % HK) * DK)[:, None] + d, is_token[:, None] & (d < DK)
        if head < HK:
            high, low = split(key * (ONE * DK**-0.5))
            tl.store(q_high + place, high, mask=mask)
            if IS_EXACT:  # or nobody reads them
                tl.store(q_low + place, low, mask=mask)
        else:
            high, low = split(key * ONE)
            tl.store(k_high + place, high, mask=mask)
            tl.store(k_low + place, low, mask=mask)
    else:
        head -= 2 * HK
        c = tl.arange(0, BV)[None, :]
        channel = 2 * HK * DK + head * DV + c
        v = _convolved(x, stride, before, window, is_kept, conv_w, channel, c < DV, CHANNELS, WIDTH)
        g, beta = gates(x, decay_rate, dt_bias, head, CHANNELS, HV, DV)
        tl.store(
            all_v + ((token * HV + head) * DV)[:, None] + c, v, mask=is_token[:, None] & (c < DV)
        )
        tl.store(all_g + token * HV + head, g, mask=is_token)
        tl.store(all_beta + token * HV + head, beta, mask=is_token)


@triton.jit
def _convolved(
    x, stride, before, window, is_kept, weight, channel, inside, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """silu(convolution) of tokens (rows), earlier columns are earlier tokens, then the window's.

    is_kept: there is a window. channel, inside: ``[1, B]``, which channels there are. Tokens beyond
    the last are the last.
    """
    weight += tl.zeros_like(before)[:, None] + channel  # by row: laid out as columns are
    if tl.min(before, 0) < WIDTH - 1:  # or no token needs the window
        total = _sum_of_taps(
            x, stride, before, window, is_kept, weight, channel, inside, CHANNELS, WIDTH, True
        )
    else:
        total = _sum_of_taps(
            x, stride, before, window, is_kept, weight, channel, inside, CHANNELS, WIDTH, False
        )
    return quick_silu(total)


@triton.jit
def _sum_of_taps(
    x, stride, before, window, is_kept, weight, channel, inside, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    total = load32(x[:, None] + channel, inside) * load32(weight + (WIDTH - 1) * CHANNELS, inside)
    for j in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - j
        place = (x - back * stride)[:, None] + channel
        if HAS_WINDOW:
            is_own = (before >= back)[:, None]
            column = load32(place, inside & is_own)
            earlier = (window + (before + j) * CHANNELS)[:, None] + channel
            column += load32(earlier, inside & (is_kept & (before < back))[:, None])
        else:
            column = load32(place, inside)
        total += column * load32(weight + j * CHANNELS, inside)
    return total

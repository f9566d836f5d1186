"""The short convolution over many tokens of ragged sequences on the GPU, and their windows.

Owns: ``conv_ragged_`` for families without a fused one, ``move_windows_`` for all. Does not know:
gates, chunks.

Invariants:
- ``conv_ragged_`` reads old windows, ``move_windows_`` replaces them: it comes later in the stream.
  One program does all windows of a sequence's channels, its saves before its own slot.
- Windows hold raw inputs, exact at every save; only the named slots change (the sink never).
Read next: ``reference.py``; ``triton.py`` (one decode step).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.triton_support import ceil_div, launch, load32, power_of_two, silu, store

_TOKENS = 16
_CONV_CHANNELS = 128
_WINDOW_CHANNELS = 512


def conv_ragged_(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch: DeviceStates,
    conv_state: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out ``[T, C]`` = silu(convolution) of the batch's tokens; the first C columns are read.

    weight: ``float32[K, C]``. bias: ``float32[C]``. conv_state: ``[slots, K-1, C]``, only read.
    Rows of tokens of no sequence are left alone.
    """
    tokens, channels = batch.sequences.shape[0], conv_state.shape[2]
    assert projected.stride(1) == out.stride(1) == 1
    assert conv_state.is_contiguous()
    assert weight.is_contiguous()
    launch(
        _conv_kernel,
        (ceil_div(tokens, _TOKENS), ceil_div(channels, _CONV_CHANNELS)),
        projected, projected.stride(0), weight, weight if bias is None else bias,
        batch.cu_seqlens, batch.sequences, batch.chunks.slots, conv_state, out, out.stride(0),
        tokens, channels, weight.shape[0], bias is not None, _TOKENS, _CONV_CHANNELS,
    )  # fmt: skip
    return out


def move_windows_(projected: torch.Tensor, batch: DeviceStates, conv_state: torch.Tensor) -> None:
    """The last K-1 columns before every save and at every sequence's end, to their slots."""
    width, channels = conv_state.shape[1] + 1, conv_state.shape[2]
    slots = batch.chunks.slots
    assert projected.stride(1) == 1
    assert conv_state.is_contiguous()
    launch(
        _windows_kernel,
        (slots.shape[0], ceil_div(channels, _WINDOW_CHANNELS)),
        projected, projected.stride(0), batch.cu_seqlens, slots, batch.save_offsets, batch.save_at,
        batch.save_slots, conv_state, channels, width, power_of_two(width - 1), _WINDOW_CHANNELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_kernel(
    projected, stride, weight, bias, cu_seqlens, sequences, slots, conv_state, out, out_stride,
    num_tokens,
    C: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Earlier columns are earlier tokens of the sequence, then its window's."""
    t, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    is_token, in_c = t < num_tokens, c < C
    sequence = tl.load(sequences + t, mask=is_token, other=0)
    before = t - tl.load(cu_seqlens + sequence, mask=is_token, other=0)
    slot = tl.load(slots + sequence, mask=is_token, other=0).to(tl.int64)
    token = t.to(tl.int64)
    window = (slot * (WIDTH - 1) + before)[:, None] * C + c[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    if HAS_BIAS:
        total += load32(bias + c, in_c)[None, :]
    for j in tl.static_range(WIDTH):
        back = WIDTH - 1 - j
        is_own = (is_token & (before >= back))[:, None] & in_c[None, :]
        is_old = (is_token & (slot != 0) & (before < back))[:, None] & in_c[None, :]
        column = load32(projected + (token - back)[:, None] * stride + c[None, :], is_own)
        column += load32(conv_state + window + j * C, is_old)
        total += column * load32(weight + j * C + c, in_c)[None, :]
    store(out + token[:, None] * out_stride + c[None, :], silu(total),
          is_token[:, None] & in_c[None, :])  # fmt: skip


@triton.jit
def _windows_kernel(
    projected, stride, cu_seqlens, slots, save_offsets, save_at, save_slots, conv_state,
    C: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A sequence's saves, then its own slot: the last WIDTH - 1 columns before each."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    count = tl.load(cu_seqlens + sequence + 1) - first
    t, c = tl.arange(0, BT)[:, None], (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    inside = (t < WIDTH - 1) & (c < C)
    old = conv_state + slot * ((WIDTH - 1) * C)
    num_saves = tl.load(save_offsets + sequence + 1) - tl.load(save_offsets + sequence)
    entry = tl.load(save_offsets + sequence)
    for i in range(num_saves + 1):
        is_own = i == num_saves
        at = tl.where(is_own, count, tl.load(save_at + entry + i, mask=i < num_saves, other=0))
        target = tl.load(save_slots + entry + i, mask=i < num_saves, other=0).to(tl.int64)
        target = tl.where(is_own, slot, target)
        position = at - (WIDTH - 1) + t
        value = load32(projected + (first + position) * stride + c, inside & (position >= 0))
        value += load32(old + (WIDTH - 1 + position) * C + c, inside & (position < 0))
        tl.debug_barrier()  # its own slot's window is read before it is written
        place = conv_state + target * ((WIDTH - 1) * C) + t * C + c
        store(place, value, inside & (target != 0))

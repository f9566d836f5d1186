"""What the two decode steps of a gated delta net share on the GPU: weights, scratch, ends.

Owns: ``PackedMixer``, ``StepScratch`` and the device functions before and after the recurrence.
Does not know: states, logs, who owns a slot.

Invariants:
- A program is one (row, value head, block of its columns). Where a block is a whole head, the
  program norms what it made. Where it is a part, outputs go through ``StepScratch.o``, and the last
  program of a key head to arrive norms those of its value heads. A counter per (row, key head)
  finds the last, which leaves it at 0 for the next layer.
- Rows of the sink (slot 0) are padding: their output is zeros, no state is touched.
Read next: ``triton.py`` (in place), ``triton_log.py`` (with a log).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_net.reference import L2_EPS, MixerWeights
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
from hyradix.kernels.triton_support import load32, sigmoid, silu, softplus, store

_L2_EPS = tl.constexpr(L2_EPS)


@dataclass(frozen=True, slots=True)
class PackedMixer:
    """``MixerWeights`` on the device, conv as ``[K, C]`` (a program reads a run of channels)."""

    num_k_heads: int
    conv: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float

    @classmethod
    def of(cls, weights: MixerWeights, device: torch.device) -> PackedMixer:
        """Once, at load."""
        conv, decay_rate, dt_bias, norm = (
            x.to(device, torch.float32).contiguous()
            for x in (weights.conv.t(), weights.decay_rate, weights.dt_bias, weights.norm)
        )
        return cls(weights.num_k_heads, conv, decay_rate, dt_bias, norm, weights.eps)


class StepScratch:
    """Memory that the steps of all layers use in turn: ``o`` before its norm, the counters, and
    what the launches of an unfused step leave for each other."""

    def __init__(
        self,
        max_batch: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device,
    ) -> None:
        self.o = torch.empty(max_batch, num_v_heads, v_dim, device=device)
        self.counters = torch.zeros(max_batch, num_k_heads, dtype=torch.int32, device=device)
        sizes = (max_batch, num_k_heads, num_v_heads, k_dim, v_dim)
        self.inputs = StreamInputs(*sizes, device)


@triton.jit
def convolved(x, taps, tap_stride, weight, channel, mask, CHANNELS, WIDTH: tl.constexpr):
    """silu(convolution) at channels: ``taps`` are WIDTH - 1 earlier columns, ``x`` the newest."""
    total = load32(x + channel, mask) * load32(weight + (WIDTH - 1) * CHANNELS + channel, mask)
    for j in tl.static_range(WIDTH - 1):
        column = load32(taps + j * tap_stride + channel, mask)
        total += column * load32(weight + j * CHANNELS + channel, mask)
    return silu(total)


@triton.jit
def convolved_by_log(
    x, window, log_conv, count, weight, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """The same by a log; the newest earlier columns are the log's, the rest the base's.

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


@triton.jit
def shift_(window, x, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The window moves on by one column, by the program that has read it."""
    tl.debug_barrier()  # a channel may be read by other threads than the one that writes it
    for j in tl.static_range(WIDTH - 2):
        later = load32(window + (j + 1) * CHANNELS + channel, mask)
        store(window + j * CHANNELS + channel, later, mask)
    store(window + (WIDTH - 2) * CHANNELS + channel, load32(x + channel, mask), mask)


@triton.jit
def pair_channels(head, d, in_k, HK: tl.constexpr, DK: tl.constexpr):
    """Channels ``[BK, 2]`` of q and k of a key head, and their mask.

    Both at once: of a vector with fewer elements than the program has threads, the compiler makes
    a copy for every layout that it is used in, loads and all.
    """
    channel = (tl.arange(0, 2)[None, :] * HK + head) * DK + d[:, None]
    return channel, tl.broadcast_to(in_k[:, None], channel.shape)


@triton.jit
def unit(x):
    """x / |x| along the first dimension, as the checkpoints' own implementation has it."""
    return x / tl.sqrt(tl.sum(x * x, 0) + _L2_EPS)


@triton.jit
def gates(x, decay_rate, dt_bias, head, CHANNELS, HV: tl.constexpr, DV: tl.constexpr):
    """g (log decay) and beta of one value head from a projected row: q k v, z, b, a."""
    b = tl.load(x + CHANNELS + HV * DV + head).to(tl.float32)
    a = tl.load(x + CHANNELS + HV * DV + HV + head).to(tl.float32)
    g = tl.load(decay_rate + head) * softplus(a + tl.load(dt_bias + head))
    return g, sigmoid(b)


@triton.jit
def is_last(counter, ARRIVALS: tl.constexpr):
    """Whether all other programs have arrived here; what they did before is then done."""
    tl.debug_barrier()  # of all threads, before the one that counts
    if ARRIVALS == 1:
        return True
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    last = arrived == ARRIVALS - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def gated_norm(o, z, weight, eps, DV: tl.constexpr):
    """rms_norm(o) * silu(z) of one value head, 0 outside of its DV values."""
    return o * weight * silu(z) / tl.sqrt(tl.sum(o * o, 0) / DV + eps)


@triton.jit
def norm_heads(
    o, x, norm, eps, out, head, CHANNELS, RATIO: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``gated_norm`` of the value heads of a key head; o: the row's, float32."""
    d = tl.arange(0, BLOCK)
    mask = d < DV
    weight = load32(norm + d, mask)
    for i in tl.static_range(RATIO):
        column = (head * RATIO + i) * DV + d
        value = tl.load(o + column, mask=mask, other=0.0)
        z = load32(x + CHANNELS + column, mask)
        store(out + column, gated_norm(value, z, weight, eps, DV), mask)

"""What the two decode steps of a gated delta net share on the GPU: weights, scratch, ends.

Owns: ``PackedMixer``, ``StepScratch`` and the device functions before and after the recurrence.
Does not know: states, logs, who owns a slot.

Invariants:
- A program is one (row, key head, split); the last split of a key head to arrive norms the outputs
  of its value heads, so one launch does all. A counter per (row, key head) finds it, and it leaves
  the counter at 0 for the next layer.
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
    """Memory that the steps of all layers use in turn: ``o`` before its norm, and the counters."""

    def __init__(
        self, max_batch: int, num_k_heads: int, num_v_heads: int, v_dim: int, device: torch.device
    ) -> None:
        self.o = torch.empty(max_batch, num_v_heads, v_dim, device=device)
        self.counters = torch.zeros(max_batch, num_k_heads, dtype=torch.int32, device=device)


@triton.jit
def convolved(x, taps, tap_stride, weight, channel, mask, CHANNELS, WIDTH: tl.constexpr):
    """silu(convolution) at channels: ``taps`` are WIDTH - 1 earlier columns, ``x`` the newest."""
    total = load32(x + channel, mask) * load32(weight + (WIDTH - 1) * CHANNELS + channel, mask)
    for j in tl.static_range(WIDTH - 1):
        column = load32(taps + j * tap_stride + channel, mask)
        total += column * load32(weight + j * CHANNELS + channel, mask)
    return silu(total)


@triton.jit
def unit(x):
    """x / |x|, as the checkpoints' own implementation has it."""
    return x / tl.sqrt(tl.sum(x * x, 0) + _L2_EPS)


@triton.jit
def gates(x, decay_rate, dt_bias, head, CHANNELS, HV: tl.constexpr, DV: tl.constexpr):
    """g (log decay) and beta of one value head from a projected row: q k v, z, b, a."""
    b = tl.load(x + CHANNELS + HV * DV + head).to(tl.float32)
    a = tl.load(x + CHANNELS + HV * DV + HV + head).to(tl.float32)
    g = tl.load(decay_rate + head) * softplus(a + tl.load(dt_bias + head))
    return g, sigmoid(b)


@triton.jit
def is_last(counter, SPLITS: tl.constexpr):
    """Whether all other splits have arrived here; what they stored before can then be read."""
    tl.debug_barrier()  # all threads' stores come before the one that counts
    if SPLITS == 1:
        return True
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    last = arrived == SPLITS - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def gated_norm(o, x, norm, eps, out, head, CHANNELS, DV: tl.constexpr, BLOCK: tl.constexpr):
    """out = rms_norm(o) * silu(z) of one value head; o: its DV float32 values."""
    d = tl.arange(0, BLOCK)
    mask = d < DV
    value = tl.load(o + d, mask=mask, other=0.0)
    z = load32(x + CHANNELS + head * DV + d, mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DV + eps)
    weight = load32(norm + d, mask)
    store(out + head * DV + d, value * scale * weight * silu(z), mask)


@triton.jit
def zero_heads(out, first, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for the value heads of a padded row."""
    d = tl.arange(0, BLOCK)
    for i in tl.static_range(HEADS):
        store(out + (first + i) * DV + d, tl.zeros([BLOCK], tl.float32), d < DV)

"""One decode step of Mamba2 by state slot: convolution, time steps, update, skip and gated norm.

Owns: ``DeviceMamba2`` (weights), time steps and the end (shared with ``triton_prefill.py`` and
``triton_tree.py``), the order of the launches. Does not know: projections.
Invariants: those of ``../tree_recurrence/triton_step.py`` and ``../causal_conv/triton.py``.
Read next: ``reference.py`` (the readable twin).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.causal_conv.triton import conv_log_step_, conv_step_
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.tree_recurrence import triton_step
from hyradix.kernels.tree_recurrence.rules import MAMBA2
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
from hyradix.kernels.triton_support import launch, load32, power_of_two, softplus


@dataclass(frozen=True, slots=True)
class DeviceMamba2:
    """``Mamba2Weights`` on the device: conv as ``[K, C]``; skip and norm as ``[groups, V]``."""

    num_k_heads: int
    conv: torch.Tensor
    conv_bias: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]
    skip: torch.Tensor
    norm: torch.Tensor
    eps: float

    @classmethod
    def of(cls, weights: Mamba2Weights, device: torch.device) -> DeviceMamba2:
        """Once, at load."""
        groups = (weights.num_norm_groups, -1)
        width = weights.norm.numel() // weights.skip.numel()
        conv, bias, rate, dt_bias, skip, norm = (
            x.to(device, torch.float32).contiguous()
            for x in (
                weights.conv.t(), weights.conv_bias, weights.decay_rate, weights.dt_bias,
                weights.skip.repeat_interleave(width).unflatten(0, groups),
                weights.norm.unflatten(0, groups),
            )
        )  # fmt: skip
        return cls(
            weights.num_k_heads, conv, bias, rate, dt_bias, weights.dt_limits, skip, norm,
            weights.eps,
        )  # fmt: skip


class Mamba2Scratch:
    """What stands between the launches of one layer; layers use it in turn."""

    def __init__(
        self, max_batch: int, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_batch, *shape, device=device)

        channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim
        self.mixed, self.o = empty(channels), empty(num_v_heads, v_dim)
        self.inputs = StreamInputs(max_batch, num_k_heads, num_v_heads, k_dim, v_dim, device)
        self.g, self.dt = empty(num_v_heads, 1), empty(num_v_heads)


def step_(
    projected: torch.Tensor,
    weights: DeviceMamba2,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: Mamba2Scratch,
    out: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    num_log_rows: torch.Tensor | None = None,
    log: SpecLayer | None = None,
) -> torch.Tensor:
    """One token of each row: out ``[N, Hv dv]``.

    Args: projected as in ``reference.mix``, N tokens; the rest as in ``kda.triton.step_``.
    """
    n, (_, num_v_heads, dk, dv) = projected.shape[0], state.shape
    channels, key_dim = conv_state.shape[2], weights.num_k_heads * dk
    x, mixed = projected[:, :channels], scratch.mixed[:n]
    if log is None:
        conv_step_(x, weights.conv, weights.conv_bias, slots, conv_state, mixed)
    else:
        conv_log_step_(
            x, weights.conv, weights.conv_bias, slots, rows, num_log_rows, conv_state, log, mixed
        )
    time_steps_(projected, weights, state, scratch.g, scratch.dt)
    q, k, v = mixed.split([key_dim, key_dim, num_v_heads * dv], dim=1)
    q, k = (x.unflatten(1, (weights.num_k_heads, dk)) for x in (q, k))
    token = (q, k, v.unflatten(1, (num_v_heads, dv)), scratch.g[:n], scratch.dt[:n])
    o = scratch.o[:n]
    if log is None:
        triton_step.step_(MAMBA2, *token, slots, state, o)
    else:
        by_log = (slots, rows, num_log_rows, state, log, scratch.inputs)
        triton_step.log_step_(MAMBA2, *token, *by_log, o)
    finish_(o, mixed, projected, weights, out)
    return out


def time_steps_(
    projected: torch.Tensor,
    weights: DeviceMamba2,
    state: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
) -> None:
    """g (log decay) and dt of every row of ``projected``, to ``float32[>= N, Hv]``."""
    _, num_v_heads, dk, dv = state.shape
    channels = 2 * weights.num_k_heads * dk + num_v_heads * dv
    launch(
        _time_steps_kernel,
        (projected.shape[0],),
        projected, projected.stride(0), weights.decay_rate, weights.dt_bias, *weights.dt_limits,
        g, dt, channels + num_v_heads * dv, num_v_heads, power_of_two(num_v_heads),
        num_warps=1,
    )  # fmt: skip


def finish_(
    o: torch.Tensor,
    mixed: torch.Tensor,
    projected: torch.Tensor,
    weights: DeviceMamba2,
    out: torch.Tensor,
) -> None:
    """out ``[N, Hv dv]``: skip of the convolved v, gate by z, norm by groups; o ``[N, Hv, dv]``."""
    groups, size = (weights.norm.shape[0], -1), out.shape[1]
    channels = mixed.shape[1]
    gated_rms_norm(
        o.flatten(1).unflatten(1, groups),
        projected[:, channels : channels + size].unflatten(1, groups),
        weights.norm, weights.eps, out.unflatten(1, groups),
        gate_first=True, skip=weights.skip, v=mixed[:, channels - size :].unflatten(1, groups),
    )  # fmt: skip


@triton.jit
def _time_steps_kernel(
    projected, stride, decay_rate, dt_bias, least, most, all_g, all_dt,
    FIRST: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    dt = softplus(load32(projected + token * stride + FIRST + h, mask) + load32(dt_bias + h, mask))
    dt = tl.minimum(tl.maximum(dt, least), most)
    tl.store(all_dt + token * H + h, dt, mask=mask)
    tl.store(all_g + token * H + h, dt * load32(decay_rate + h, mask), mask=mask)

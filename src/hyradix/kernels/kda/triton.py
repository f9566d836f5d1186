"""One decode step of Kimi delta attention by state slot: convolution, gates, update, gated norm.

Owns: ``DeviceKda`` (weights), the gates, the order of the launches. Does not know: projections.
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
from hyradix.kernels.gated_delta_net.triton_parts import unit
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.tree_recurrence import triton_step
from hyradix.kernels.tree_recurrence.rules import KDA
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import launch, load32, power_of_two, sigmoid, softplus


@dataclass(frozen=True, slots=True)
class DeviceKda:
    """``KdaWeights`` on the device, conv as ``[K, C]``."""

    conv: torch.Tensor
    rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    lower_bound: float | None

    @classmethod
    def of(cls, weights: KdaWeights, device: torch.device) -> DeviceKda:
        """Once, at load."""
        given = (weights.conv.t(), weights.rate, weights.dt_bias, weights.norm)
        moved = (x.to(device, torch.float32).contiguous() for x in given)
        return cls(*moved, weights.eps, weights.lower_bound)


class KdaScratch:
    """What stands between the launches of one layer; layers use it in turn."""

    def __init__(
        self, max_batch: int, num_heads: int, k_dim: int, v_dim: int, device: torch.device
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_batch, *shape, device=device)

        self.mixed = empty(num_heads * (2 * k_dim + v_dim))
        self.q, self.k, self.g = (empty(num_heads, k_dim) for _ in "qkg")
        self.beta, self.o = empty(num_heads), empty(num_heads, v_dim)


def step_(
    projected: torch.Tensor,
    forget: torch.Tensor,
    gate: torch.Tensor,
    weights: DeviceKda,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: KdaScratch,
    out: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    num_log_rows: torch.Tensor | None = None,
    log: SpecLayer | None = None,
) -> torch.Tensor:
    """One token of each row: out ``[N, H dv]``.

    Args: projected, forget, gate as in ``reference.mix``, N tokens. slots ``int32[N]``, 0: padding.
    Without a log states and windows change in place; with one (and rows, num_log_rows ``int32[N]``)
    they are read only, and a row and a column are appended.
    """
    n, (_, heads, dk, dv) = projected.shape[0], state.shape
    channels = conv_state.shape[2]
    x, mixed = projected[:, :channels], scratch.mixed[:n]
    if log is None:
        conv_step_(x, weights.conv, None, slots, conv_state, mixed)
    else:
        conv_log_step_(x, weights.conv, None, slots, rows, num_log_rows, conv_state, log, mixed)
    launch(
        _gates_kernel,
        (n, heads),
        mixed, projected, projected.stride(0), forget, forget.stride(0), weights.rate,
        weights.dt_bias, weights.lower_bound or 0.0, scratch.q, scratch.k, scratch.g, scratch.beta,
        channels, heads, dk, power_of_two(dk), weights.lower_bound is not None,
        num_warps=1,
    )  # fmt: skip
    v = mixed[:, channels - heads * dv :].unflatten(1, (heads, dv))
    token = (scratch.q[:n], scratch.k[:n], v, scratch.g[:n], scratch.beta[:n])
    o = scratch.o[:n]
    if log is None:
        triton_step.step_(KDA, *token, slots, state, o)
    else:
        triton_step.log_step_(KDA, *token, slots, rows, num_log_rows, state, log, o)
    gated_rms_norm(
        o, gate.unflatten(1, (heads, dv)), weights.norm, weights.eps,
        out.unflatten(1, (heads, dv)), activation="sigmoid",
    )  # fmt: skip
    return out


@triton.jit
def _gates_kernel(
    mixed, projected, projected_stride, forget, forget_stride, rates, dt_bias, bound,
    all_q, all_k, all_g, all_beta,
    C: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """One head of one token: q and k to length 1, log decays by channel, beta."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BK)
    mask = d < DK
    q = unit(load32(mixed + token * C + head * DK + d, mask)) * (DK**-0.5)
    k = unit(load32(mixed + token * C + (H + head) * DK + d, mask))
    f = load32(forget + token * forget_stride + head * DK + d, mask)
    f += load32(dt_bias + head * DK + d, mask)
    rate = tl.load(rates + head)
    g = bound * sigmoid(rate * f) if HAS_BOUND else -rate * softplus(f)
    place = (token * H + head) * DK + d
    tl.store(all_q + place, q, mask=mask)
    tl.store(all_k + place, k, mask=mask)
    tl.store(all_g + place, g, mask=mask)
    beta = sigmoid(tl.load(projected + token * projected_stride + C + head).to(tl.float32))
    tl.store(all_beta + token * H + head, beta)

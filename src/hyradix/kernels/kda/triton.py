"""One decode step of Kimi delta attention by state slot: convolution, gates, update, gated norm.

Owns: ``DeviceKda`` (weights), gates and norm (shared with ``triton_prefill.py`` and
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
from hyradix.kernels.gated_delta_net.triton_parts import unit
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.tree_recurrence import triton_step
from hyradix.kernels.tree_recurrence.rules import KDA
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
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
        self.g, self.beta = empty(num_heads, k_dim), empty(num_heads)
        self.o = empty(num_heads, v_dim)
        self.inputs = StreamInputs(max_batch, num_heads, num_heads, k_dim, v_dim, device)


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
    gates_(mixed, projected, forget, weights, state, scratch.g, scratch.beta)
    q, k = mixed[:, : 2 * heads * dk].unflatten(1, (2, heads, dk)).unbind(1)
    v = mixed[:, channels - heads * dv :].unflatten(1, (heads, dv))
    token = (q, k, v, scratch.g[:n], scratch.beta[:n])
    o = scratch.o[:n]
    if log is None:
        triton_step.step_(KDA, *token, slots, state, o)
    else:
        triton_step.log_step_(KDA, *token, slots, rows, num_log_rows, state, log, scratch.inputs, o)
    finish_(o, gate, weights, out)
    return out


def gates_(
    mixed: torch.Tensor,
    projected: torch.Tensor,
    forget: torch.Tensor,
    weights: DeviceKda,
    state: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """Of N rows of ``mixed``: q and k to length 1 (and q scaled) in place; their g and beta.

    mixed: ``float32[N, C]``. g: ``float32[>= N, H, dk]``. beta: ``float32[>= N, H]``.
    """
    _, heads, dk, _ = state.shape
    assert mixed.is_contiguous()
    assert projected.stride(1) == forget.stride(1) == 1
    launch(
        _gates_kernel,
        (mixed.shape[0], heads),
        mixed, projected, projected.stride(0), forget, forget.stride(0), weights.rate,
        weights.dt_bias, weights.lower_bound or 0.0, g, beta,
        mixed.shape[1], heads, dk, power_of_two(dk), weights.lower_bound is not None,
        num_warps=1,
    )  # fmt: skip


def finish_(o: torch.Tensor, gate: torch.Tensor, weights: DeviceKda, out: torch.Tensor) -> None:
    """out ``[N, H dv]`` = rms_norm(o) sigmoid(gate) by heads; o ``[N, H, dv]``."""
    heads = o.shape[1:]
    gated_rms_norm(
        o, gate.unflatten(1, heads), weights.norm, weights.eps, out.unflatten(1, heads),
        activation="sigmoid",
    )  # fmt: skip


@triton.jit
def _gates_kernel(
    mixed, projected, projected_stride, forget, forget_stride, rates, dt_bias, bound,
    all_g, all_beta,
    C: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """One head of one token: q and k to length 1, log decays by channel, beta."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BK)
    mask = d < DK
    q_place = mixed + token * C + head * DK + d
    q, k = load32(q_place, mask), load32(q_place + H * DK, mask)
    tl.store(q_place, unit(q) * (DK**-0.5), mask=mask)
    tl.store(q_place + H * DK, unit(k), mask=mask)
    f = load32(forget + token * forget_stride + head * DK + d, mask)
    f += load32(dt_bias + head * DK + d, mask)
    rate = tl.load(rates + head)
    g = bound * sigmoid(rate * f) if HAS_BOUND else -rate * softplus(f)
    tl.store(all_g + (token * H + head) * DK + d, g, mask=mask)
    beta = sigmoid(tl.load(projected + token * projected_stride + C + head).to(tl.float32))
    tl.store(all_beta + token * H + head, beta)

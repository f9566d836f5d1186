"""The mixer of Kimi delta attention in torch: convolution, gates, delta rule, gated norm.

Owns: both forms of the decay, how the parts fit together on a ragged batch.
Does not know: projections, who owns a slot.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change.
Read next: ``../tree_recurrence/chunked.py``, ``compiled.py`` (the fast twin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.gated_delta_net.reference import L2_EPS, RaggedStates
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.tree_recurrence.chunked import chunked
from hyradix.kernels.tree_recurrence.rules import KDA, Inputs, read, update


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """Float32 weights of one layer: H heads, dk and dv their sizes, C = H (2 dk + dv) channels.

    conv: ``[C, K]``, the convolutions of q (H dk), k (H dk) and v (H dv) one after the other.
    rate: ``[H]``, exp(A_log). dt_bias: ``[H dk]``. norm: ``[dv]``.
    lower_bound: None for g = -rate softplus(f + dt_bias); else g = lower_bound sigmoid(rate
    (f + dt_bias)), which stays above that (negative) bound.
    """

    num_heads: int
    conv: torch.Tensor
    rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    lower_bound: float | None = None


def mix(
    projected: torch.Tensor,
    forget: torch.Tensor,
    gate: torch.Tensor,
    weights: KdaWeights,
    batch: RaggedStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run every sequence from its slot's state; update the slot, fill the saves.

    Args:
        projected: ``[T, C + H]`` or wider: q k v, then b; what follows is not read.
        forget: ``[T, H dk]``, f. gate: ``[T, H dv]``, before its sigmoid.
        conv_state: ``[slots, K-1, C]``. state: ``[slots, H, dk, dv]``.

    Returns: ``[T, H dv]``, before the output projection.
    """
    out = torch.empty_like(gate)
    for i, slot in enumerate(batch.slots.tolist()):
        first, last = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        if first == last:
            continue
        saves = slice(int(batch.save_offsets[i]), int(batch.save_offsets[i + 1]))
        save_at = batch.save_at[saves].tolist()
        piece = slice(first, last)
        o, final, saved, columns = _run(
            projected[piece], forget[piece], weights, conv_state[slot], state[slot], save_at
        )
        out[piece] = finish(o, gate[piece], weights)
        width = conv_state.shape[1]
        for count, target, value in zip(
            save_at, batch.save_slots[saves].tolist(), saved, strict=True
        ):
            state[target] = value
            conv_state[target] = columns[count : count + width]
        state[slot] = final
        conv_state[slot] = columns[last - first :]
    return out


def log_decay(forget: torch.Tensor, weights: KdaWeights) -> torch.Tensor:
    """f ``[T, H dk]`` -> g ``[T, H, dk]``."""
    f = (forget + weights.dt_bias).unflatten(1, (weights.num_heads, -1))
    rate = weights.rate.unsqueeze(-1)
    bound = weights.lower_bound
    g: torch.Tensor = -rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid()
    return g


def _run(
    projected: torch.Tensor,
    forget: torch.Tensor,
    weights: KdaWeights,
    window: torch.Tensor,
    initial: torch.Tensor,
    save_at: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """One sequence: outputs before the norm, final state, saved states, raw columns."""
    q, inputs, columns = prepare(projected, forget, weights, window, initial.shape)
    if projected.shape[0] == 1:
        _, final = update(KDA, initial, inputs.k[0], inputs.v[0], inputs.g[0], inputs.beta[0])
        return read(final, q[0]).unsqueeze(0), final, [final] * len(save_at), columns
    o, final, saved = chunked(KDA, q, inputs, initial, save_at=save_at)
    return o, final, saved, columns


def prepare(
    projected: torch.Tensor,
    forget: torch.Tensor,
    weights: KdaWeights,
    window: torch.Tensor,
    heads: tuple[int, ...],
) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
    """q ``[n, H, dk]``, the recurrence's inputs (no leading N), all raw columns ``[K-1+n, C]``.

    projected, forget: n tokens that follow ``window`` ``[K-1, C]``. heads: (H, dk, dv).
    """
    num_heads, dk, dv = heads
    channels = num_heads * (2 * dk + dv)
    mixed, columns = causal_conv(projected[:, :channels], weights.conv, window)
    q, k, v = (
        x.unflatten(1, (num_heads, -1))
        for x in mixed.split([num_heads * dk, num_heads * dk, num_heads * dv], dim=1)
    )
    beta = projected[:, channels : channels + num_heads].sigmoid()
    inputs = Inputs(_unit(k), v, log_decay(forget, weights), beta)
    return _unit(q) * dk**-0.5, inputs, columns


def finish(o: torch.Tensor, gate: torch.Tensor, weights: KdaWeights) -> torch.Tensor:
    """``[n, H, dv]`` -> ``[n, H dv]``: rms_norm(o) sigmoid(gate)."""
    normed: torch.Tensor = rms_norm(o, weights.norm, weights.eps).flatten(1) * gate.sigmoid()
    return normed


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)

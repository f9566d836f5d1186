"""The recurrent mixer of Mamba2 in torch: convolution, time steps, state, skip, gated norm.

Owns: how the parts fit together on a ragged batch. Does not know: projections, who owns a slot.

In the words of the pools: k is B, q is C (groups are the key heads), v is x. ``projected`` and the
convolution's channels are in the order q, k, v, as in every family here; a checkpoint's own order
(z, x, B, C, dt) is changed once, at load.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change; time
steps are clamped for every token alike, so that no result depends on how a sequence is split.
Read next: ``compiled.py`` (the fast twin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.tree_recurrence.chunked import chunked
from hyradix.kernels.tree_recurrence.rules import MAMBA2, Inputs, read, update


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Float32 weights of one layer. Hk groups, Hv heads, dk, dv the sizes of B and x, C channels.

    conv: ``[C, K]`` with channels q (Hk dk), k (Hk dk), v (Hv dv); conv_bias: ``[C]``. decay_rate,
    dt_bias, skip (D): ``[Hv]``. dt_limits: time steps are clamped to them. norm: ``[Hv dv]``, over
    ``num_norm_groups`` equal parts of the gated output.
    """

    num_k_heads: int
    conv: torch.Tensor
    conv_bias: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]
    skip: torch.Tensor
    norm: torch.Tensor
    num_norm_groups: int
    eps: float


def mix(
    projected: torch.Tensor,
    weights: Mamba2Weights,
    batch: RaggedStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run every sequence from its slot's state; update the slot, fill the saves.

    Tokens of no sequence (nodes of draft trees, at the end) are left out.

    Args:
        projected: ``[T, C + Hv dv + Hv]``: q k v, then z, dt.
        conv_state: ``[slots, K-1, C]``. state: ``[slots, Hv, dk, dv]``.

    Returns: ``[T, Hv dv]``, before the output projection.
    """
    out = projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])
    width = conv_state.shape[1]
    for i, slot in enumerate(batch.slots.tolist()):
        first, last = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        if first == last:
            continue
        saves = slice(int(batch.save_offsets[i]), int(batch.save_offsets[i + 1]))
        counts = batch.save_at[saves].tolist()
        tokens = projected[first:last]
        q, inputs, columns = prepare(tokens, weights, conv_state[slot], state.shape[1:])
        o, final, saved = _run(q, inputs, state[slot], counts)
        out[first:last] = finish(o, inputs.v, tokens, weights)
        for count, target, value in zip(
            counts, batch.save_slots[saves].tolist(), saved, strict=True
        ):
            state[target] = value
            conv_state[target] = columns[count : count + width]
        state[slot] = final
        conv_state[slot] = columns[last - first :]
    return out


def _run(
    q: torch.Tensor, inputs: Inputs, initial: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One sequence: o, final state, saved states. A single token is one ``update``."""
    if q.shape[0] > 1:
        return chunked(MAMBA2, q, inputs, initial, save_at=counts)
    _, final = update(MAMBA2, initial, inputs.k[0], inputs.v[0], inputs.g[0], inputs.beta[0])
    return read(final, q[0]).unsqueeze(0), final, [final] * len(counts)


def prepare(
    projected: torch.Tensor,
    weights: Mamba2Weights,
    window: torch.Tensor,
    heads: tuple[int, ...],
) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
    """q ``[n, Hk, dk]``, the recurrence's inputs (no leading N), all raw columns ``[K-1+n, C]``.

    projected: ``[n, ...]`` tokens that follow ``window`` ``[K-1, C]``. heads: (Hv, dk, dv).
    """
    num_v_heads, dk, dv = heads
    key_dim, value_dim = weights.num_k_heads * dk, num_v_heads * dv
    raw, _, dt = projected.split([2 * key_dim + value_dim, value_dim, num_v_heads], dim=1)
    mixed, columns = causal_conv(raw, weights.conv, window, weights.conv_bias)
    q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=1)
    dt = F.softplus(dt + weights.dt_bias).clamp(*weights.dt_limits)
    inputs = Inputs(
        k.unflatten(1, (-1, dk)),
        v.unflatten(1, (-1, dv)),
        (weights.decay_rate * dt).unsqueeze(2),
        dt,
    )
    return q.unflatten(1, (-1, dk)), inputs, columns


def finish(
    o: torch.Tensor, v: torch.Tensor, projected: torch.Tensor, weights: Mamba2Weights
) -> torch.Tensor:
    """o and v ``[n, Hv, dv]`` -> ``[n, Hv dv]``: skip, gate by the tokens' z, norm by groups."""
    num_v_heads, dv = o.shape[1:]
    y = (o + weights.skip.unsqueeze(1) * v).flatten(1)
    z = projected[:, -(dv + 1) * num_v_heads : -num_v_heads]
    groups = (weights.num_norm_groups, -1)
    gated = (y * F.silu(z)).unflatten(1, groups)
    return rms_norm(gated, weights.norm.unflatten(0, groups), weights.eps).flatten(1)

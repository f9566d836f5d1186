"""The recurrent mixer of a gated delta net in torch: convolution, gates, delta rule, gated norm.

Owns: how the parts fit together on a ragged batch. Does not know: projections, who owns a slot.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change; a
single token is one ``update`` and one ``read``, as a node of a draft tree is (``tree_reference``).
Read next: ``compiled.py`` (the fast twin).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.rms_norm.reference import gated_rms_norm
from hyradix.kernels.tree_recurrence.chunked import chunked
from hyradix.kernels.tree_recurrence.rules import GDN, Inputs, read, update

Int32Array = npt.NDArray[np.int32]
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class RaggedStates:
    """Which tokens belong to which state slot, and where copies of it go.

    cu_seqlens: ``int32[N+1]``; sequence i has tokens cu_seqlens[i] : cu_seqlens[i+1].
    slots: ``int32[N]`` working slots, all different.
    save_offsets: ``int32[N+1]``; sequence i has saves save_offsets[i] : save_offsets[i+1].
    save_at: ``int32[S]`` ascending per sequence: counts of this call's tokens (1: the first).
    save_slots: ``int32[S]`` where the state at that point is copied to.
    """

    cu_seqlens: Int32Array
    slots: Int32Array
    save_offsets: Int32Array
    save_at: Int32Array
    save_slots: Int32Array


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """Float32 weights of one layer. Hk, Hv key and value heads, dk, dv their sizes, C channels.

    conv: ``[C, K]`` with channels q (Hk dk), k (Hk dk), v (Hv dv). decay_rate: ``[Hv]``,
    -exp(A_log). dt_bias: ``[Hv]``. norm: ``[dv]``.
    """

    num_k_heads: int
    conv: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


def mix(
    projected: torch.Tensor,
    weights: MixerWeights,
    batch: RaggedStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run every sequence from its slot's state; update the slot, fill the saves.

    Tokens of no sequence (nodes of draft trees, at the end) are left out.

    Args:
        projected: ``[T, C + Hv dv + 2 Hv]``: q k v, then z, b, a.
        conv_state: ``[slots, K-1, C]``. state: ``[slots, Hv, dk, dv]``.

    Returns: ``[T, Hv dv]``, before the output projection.
    """
    out = projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])
    for i, slot in enumerate(batch.slots.tolist()):
        first, last = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        if first == last:
            continue
        saves = slice(int(batch.save_offsets[i]), int(batch.save_offsets[i + 1]))
        save_at = batch.save_at[saves].tolist()
        o, final, saved, columns = _run(
            projected[first:last], weights, conv_state[slot], state[slot], save_at
        )
        out[first:last] = o
        width = conv_state.shape[1]
        for count, target, value in zip(
            save_at, batch.save_slots[saves].tolist(), saved, strict=True
        ):
            state[target] = value
            conv_state[target] = columns[count : count + width]
        state[slot] = final
        conv_state[slot] = columns[last - first :]
    return out


def _run(
    projected: torch.Tensor,
    weights: MixerWeights,
    window: torch.Tensor,
    initial: torch.Tensor,
    save_at: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """One sequence: outputs, final state, saved states, raw convolution columns."""
    q, inputs, columns = prepare(projected, weights, window, initial.shape)
    if projected.shape[0] == 1:
        _, final = update(GDN, initial, inputs.k[0], inputs.v[0], inputs.g[0], inputs.beta[0])
        o, saved = read(final, q[0]).unsqueeze(0), [final] * len(save_at)
    else:
        o, final, saved = chunked(GDN, q, inputs, initial, save_at=save_at)
    return finish(o, projected, weights), final, saved, columns


def prepare(
    projected: torch.Tensor,
    weights: MixerWeights,
    window: torch.Tensor,
    heads: tuple[int, ...],
) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
    """q ``[n, Hk, dk]``, the recurrence's inputs (no leading N), all raw columns ``[K-1+n, C]``.

    projected: ``[n, ...]`` tokens that follow ``window`` ``[K-1, C]``. heads: (Hv, dk, dv).
    """
    num_v_heads, dk, dv = heads
    key_dim, value_dim = weights.num_k_heads * dk, num_v_heads * dv
    mixed, _, b, a = projected.split(
        [2 * key_dim + value_dim, value_dim, num_v_heads, num_v_heads], dim=1
    )
    mixed, columns = causal_conv(mixed, weights.conv, window)
    q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=1)
    q = _unit(q.unflatten(1, (-1, dk))) * dk**-0.5
    k = _unit(k.unflatten(1, (-1, dk)))
    g = weights.decay_rate * F.softplus(a + weights.dt_bias)
    return q, Inputs(k, v.unflatten(1, (-1, dv)), g.unsqueeze(2), b.sigmoid()), columns


def finish(o: torch.Tensor, projected: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
    """``[n, Hv, dv]`` -> ``[n, Hv dv]``: norm, gated by the tokens' z."""
    num_v_heads, dv = o.shape[1:]
    z = projected[:, -(dv + 2) * num_v_heads : -2 * num_v_heads]
    return gated_rms_norm(o, z.unflatten(1, (-1, dv)), weights.norm, weights.eps).flatten(1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)

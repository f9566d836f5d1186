"""The recurrent mixer of a gated delta net in torch: convolution, gates, delta rule, gated norm.

Owns: how the parts of any family's mixer fit together on a ragged batch; this family's parts.
Does not know: projections, who owns a slot.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change; a
single token is one ``update`` and one ``read``, as a node of a draft tree is (``layer_reference``).
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
from hyradix.kernels.tree_recurrence.layer_reference import MixerTokens
from hyradix.kernels.tree_recurrence.rules import GDN, Inputs, Rule, read, update

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
    layer = GdnTokens(projected, weights, state.shape[1:])
    run_sequences(GDN, layer, batch, conv_state, state, out)
    return out


def run_sequences(
    rule: Rule,
    layer: MixerTokens,
    batch: RaggedStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """``mix`` of any family: fills the rows of ``out`` that are tokens of a sequence."""
    width = conv_state.shape[1]
    for i, slot in enumerate(batch.slots.tolist()):
        tokens = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        if tokens.start == tokens.stop:
            continue
        saves = slice(int(batch.save_offsets[i]), int(batch.save_offsets[i + 1]))
        counts = batch.save_at[saves].tolist()
        q, inputs, columns = layer.prepare(tokens, conv_state[slot])
        o, final, saved = _run(rule, q, inputs, state[slot], counts)
        out[tokens] = layer.finish(o, inputs, tokens)
        for count, target, value in zip(
            counts, batch.save_slots[saves].tolist(), saved, strict=True
        ):
            state[target] = value
            conv_state[target] = columns[count : count + width]
        state[slot] = final
        conv_state[slot] = columns[tokens.stop - tokens.start :]


def _run(
    rule: Rule, q: torch.Tensor, inputs: Inputs, initial: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One sequence: o, final state, saved states. A single token is one ``update``."""
    if q.shape[0] > 1:
        return chunked(rule, q, inputs, initial, save_at=counts)
    _, final = update(rule, initial, inputs.k[0], inputs.v[0], inputs.g[0], inputs.beta[0])
    return read(final, q[0]).unsqueeze(0), final, [final] * len(counts)


@dataclass(frozen=True, slots=True)
class GdnTokens:
    """``MixerTokens`` of a gated delta net; projected as in ``mix``. heads: (Hv, dk, dv)."""

    projected: torch.Tensor
    weights: MixerWeights
    heads: tuple[int, ...]

    def prepare(
        self, tokens: slice, window: torch.Tensor
    ) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
        """See ``MixerTokens``."""
        weights, (num_v_heads, dk, dv) = self.weights, self.heads
        key_dim, value_dim = weights.num_k_heads * dk, num_v_heads * dv
        mixed, _, b, a = self.projected[tokens].split(
            [2 * key_dim + value_dim, value_dim, num_v_heads, num_v_heads], dim=1
        )
        mixed, columns = causal_conv(mixed, weights.conv, window)
        q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=1)
        q = unit(q.unflatten(1, (-1, dk))) * dk**-0.5
        k = unit(k.unflatten(1, (-1, dk)))
        g = weights.decay_rate * F.softplus(a + weights.dt_bias)
        return q, Inputs(k, v.unflatten(1, (-1, dv)), g.unsqueeze(2), b.sigmoid()), columns

    def finish(self, o: torch.Tensor, inputs: Inputs, tokens: slice) -> torch.Tensor:
        """The norm, gated by the tokens' z."""
        num_v_heads, _, dv = self.heads
        z = self.projected[tokens, -(dv + 2) * num_v_heads : -2 * num_v_heads]
        weights = self.weights
        return gated_rms_norm(o, z.unflatten(1, (-1, dv)), weights.norm, weights.eps).flatten(1)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length one, by their last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)

"""The recurrent mixer of Mamba2 in torch: convolution, time steps, state, skip, gated norm.

Owns: this family's parts. Does not know: projections, who owns a slot.

In the words of the pools: k is B, q is C (groups are the key heads), v is x. ``projected`` and the
convolution's channels are in the order q, k, v, as in every family here; a checkpoint's own order
(z, x, B, C, dt) is changed once, at load.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change; time
steps are clamped for every token alike, so that no result depends on how a sequence is split.
Read next: ``../gated_delta_net/reference.py`` (how the parts fit together), ``compiled.py`` (the
fast twin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.gated_delta_net.reference import RaggedStates, run_sequences
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.tree_recurrence.rules import MAMBA2, Inputs


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
    layer = Mamba2Tokens(projected, weights, state.shape[1:])
    run_sequences(MAMBA2, layer, batch, conv_state, state, out)
    return out


@dataclass(frozen=True, slots=True)
class Mamba2Tokens:
    """``MixerTokens`` of Mamba2; projected as in ``mix``. heads: (Hv, dk, dv)."""

    projected: torch.Tensor
    weights: Mamba2Weights
    heads: tuple[int, ...]

    def prepare(
        self, tokens: slice, window: torch.Tensor
    ) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
        """See ``MixerTokens``."""
        weights, (num_v_heads, dk, dv) = self.weights, self.heads
        key_dim, value_dim = weights.num_k_heads * dk, num_v_heads * dv
        raw, _, dt = self.projected[tokens].split(
            [2 * key_dim + value_dim, value_dim, num_v_heads], dim=1
        )
        mixed, columns = causal_conv(raw, weights.conv, window, weights.conv_bias)
        q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=1)
        dt = F.softplus(dt + weights.dt_bias).clamp(*weights.dt_limits)
        g = (weights.decay_rate * dt).unsqueeze(2)
        inputs = Inputs(k.unflatten(1, (-1, dk)), v.unflatten(1, (-1, dv)), g, dt)
        return q.unflatten(1, (-1, dk)), inputs, columns

    def finish(self, o: torch.Tensor, inputs: Inputs, tokens: slice) -> torch.Tensor:
        """Skip, gate by the tokens' z, norm by groups."""
        weights, (num_v_heads, _, dv) = self.weights, self.heads
        y = (o + weights.skip.unsqueeze(1) * inputs.v).flatten(1)
        z = self.projected[tokens, -(dv + 1) * num_v_heads : -num_v_heads]
        groups = (weights.num_norm_groups, -1)
        gated = (y * F.silu(z)).unflatten(1, groups)
        return rms_norm(gated, weights.norm.unflatten(0, groups), weights.eps).flatten(1)

"""The mixer of Kimi delta attention in torch: convolution, gates, delta rule, gated norm.

Owns: both forms of the decay, this family's parts. Does not know: projections, who owns a slot.
Invariants: float32 throughout; states exact at every saved depth; only the named slots change.
Read next: ``../gated_delta_net/reference.py`` (how the parts fit together), ``compiled.py`` (the
fast twin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.gated_delta_net.reference import RaggedStates, run_sequences, unit
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.tree_recurrence.rules import KDA, Inputs


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
    layer = KdaTokens(projected, forget, gate, weights, state.shape[1:])
    run_sequences(KDA, layer, batch, conv_state, state, out)
    return out


def log_decay(forget: torch.Tensor, weights: KdaWeights) -> torch.Tensor:
    """f ``[T, H dk]`` -> g ``[T, H, dk]``."""
    f = (forget + weights.dt_bias).unflatten(1, (weights.num_heads, -1))
    rate = weights.rate.unsqueeze(-1)
    bound = weights.lower_bound
    g: torch.Tensor = -rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid()
    return g


@dataclass(frozen=True, slots=True)
class KdaTokens:
    """``MixerTokens`` of Kimi delta attention; arrays as in ``mix``. heads: (H, dk, dv)."""

    projected: torch.Tensor
    forget: torch.Tensor
    gate: torch.Tensor
    weights: KdaWeights
    heads: tuple[int, ...]

    def prepare(
        self, tokens: slice, window: torch.Tensor
    ) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
        """See ``MixerTokens``."""
        num_heads, dk, dv = self.heads
        channels = num_heads * (2 * dk + dv)
        projected = self.projected[tokens]
        mixed, columns = causal_conv(projected[:, :channels], self.weights.conv, window)
        q, k, v = (
            x.unflatten(1, (num_heads, -1))
            for x in mixed.split([num_heads * dk, num_heads * dk, num_heads * dv], dim=1)
        )
        beta = projected[:, channels : channels + num_heads].sigmoid()
        inputs = Inputs(unit(k), v, log_decay(self.forget[tokens], self.weights), beta)
        return unit(q) * dk**-0.5, inputs, columns

    def finish(self, o: torch.Tensor, inputs: Inputs, tokens: slice) -> torch.Tensor:
        """rms_norm(o) sigmoid(gate)."""
        normed = rms_norm(o, self.weights.norm, self.weights.eps).flatten(1)
        return normed * self.gate[tokens].sigmoid()

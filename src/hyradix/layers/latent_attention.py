"""Attention to latent rows. Owns: its weights. Read next: ``kernels/mla``."""

from __future__ import annotations

import torch

from hyradix.kernels.attention.queries import WantedTokens
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.norm import RmsNorm


class LatentAttention:
    """``index`` counts attention layers only: it names this layer's part of the KV pool.

    into: ``[H D + E, hidden]``: q of all heads, then the row before its norm.
    out: ``[hidden, H V]``.
    """

    def __init__(
        self,
        ops: Ops,
        index: int,
        into: torch.Tensor,
        out: torch.Tensor,
        weights: LatentWeights,
    ) -> None:
        self._ops = ops
        self._index = index
        self._into = ops.pack_linear(into)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_latent_attention(weights)

    def mix(
        self, x: Array, norm: RmsNorm, context: ForwardContext, wanted: WantedTokens | None = None
    ) -> Array:
        """See ``models.decoder.Mixer``; ``[T, H V]``."""
        projected = self._ops.norm_linear(x, norm.packed, self._into)
        rows = context.memory.k[self._index]
        return self._ops.latent_attention(projected, self._weights, context.queries, rows, wanted)

    def add(self, mixed: Array, x: Array) -> Array:
        """``[T, H V]`` of ``mix`` and x -> x + attention(norm(x))."""
        return self._ops.linear_add(mixed, self._out, x)

"""Full attention with an output gate. Owns: its weights. Read next: ``kernels/attention``."""

from __future__ import annotations

import torch

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.norm import RmsNorm


class GatedAttention:
    """``index`` counts attention layers only: it names this layer's part of the KV pool.

    qkvg: ``[(2 H + 2 Hkv) D, hidden]``: q of all heads, k, v, gates. out: ``[hidden, H D]``.
    """

    def __init__(
        self,
        ops: Ops,
        index: int,
        qkvg: torch.Tensor,
        out: torch.Tensor,
        weights: AttentionWeights,
    ) -> None:
        self._ops = ops
        self._index = index
        self._qkvg = ops.pack_linear(qkvg)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_attention(weights)

    def forward(self, x: Array, norm: RmsNorm, context: ForwardContext) -> Array:
        """``[T, hidden]`` -> x + attention(norm(x)), ``[T, hidden]``."""
        projected = self._ops.norm_linear(x, norm.packed, self._qkvg)
        k, v = context.memory.k[self._index], context.memory.v[self._index]
        mixed = self._ops.attention(projected, self._weights, context.queries, k, v)
        return self._ops.linear_add(mixed, self._out, x)

"""Full attention: over its own KV, or over another layer's.

Owns: its weights. Read next: ``kernels/attention``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.norm import RmsNorm


class Attention:
    """``index`` counts attention layers only: it names this layer's part of the KV pool.

    qkvg: ``[(2 H + 2 Hkv) D, hidden]``: q of all heads, k, v, gates (where the weights say that
    there are any). out: ``[hidden, H D]``. scale: of what is added to x.
    """

    def __init__(
        self,
        ops: Ops,
        index: int,
        qkvg: torch.Tensor,
        out: torch.Tensor,
        weights: AttentionWeights,
        *,
        scale: float = 1.0,
    ) -> None:
        self._ops = ops
        self._index = index
        self._qkvg = ops.pack_linear(qkvg)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_attention(weights)
        self._scale = scale

    def mix(
        self, x: Array, norm: RmsNorm, context: ForwardContext, wanted: WantedTokens | None = None
    ) -> Array:
        """See ``models.decoder.Mixer``; ``[T, H D]``."""
        k, v = context.memory.k[self._index], context.memory.v[self._index]
        return self._mix(x, norm, context.queries, k, v, wanted)

    def add(self, mixed: Array, x: Array) -> Array:
        """``[T, H D]`` of ``mix`` and x -> x + scale attention(norm(x))."""
        if self._scale != 1.0:
            mixed *= self._scale
        return self._ops.linear_add(mixed, self._out, x)

    def attend(self, x: Array, norm: RmsNorm, queries: RaggedQueries, k: Array, v: Array) -> Array:
        """``[T, hidden]`` -> ``[T, hidden]``, over a given layer's pool, ``[slots, Hkv, D]``."""
        return self.add(self._mix(x, norm, queries, k, v), x)

    def _mix(
        self,
        x: Array,
        norm: RmsNorm,
        queries: RaggedQueries,
        k: Array,
        v: Array,
        wanted: WantedTokens | None = None,
    ) -> Array:
        projected = self._ops.norm_linear(x, norm.packed, self._qkvg)
        return self._ops.attention(projected, self._weights, queries, k, v, wanted)


class FrozenAttention:
    """Queries over KV that another layer wrote; it has none of its own and writes none.

    qg: ``[2 H D, hidden]``: q of all heads, then gates. out: ``[hidden, H D]``.
    """

    def __init__(
        self, ops: Ops, qg: torch.Tensor, out: torch.Tensor, weights: AttentionWeights
    ) -> None:
        self._ops = ops
        self._qg = ops.pack_linear(qg)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_attention(weights)

    def attend(self, x: Array, norm: RmsNorm, queries: RaggedQueries, k: Array, v: Array) -> Array:
        """``[T, hidden]`` -> x + attention(norm(x)). k, v: read-only, ``[slots, Hkv, D]``."""
        projected = self._ops.norm_linear(x, norm.packed, self._qg)
        mixed = self._ops.attend_frozen(projected, self._weights, queries, k, v)
        return self._ops.linear_add(mixed, self._out, x)

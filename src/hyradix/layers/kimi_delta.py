"""Kimi delta attention, a recurrent layer. Owns: its weights. Read next: ``kernels/kda``."""

from __future__ import annotations

import torch

from hyradix.kernels.attention.queries import WantedTokens
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.norm import RmsNorm

LowRank = tuple[torch.Tensor, torch.Tensor]


class KimiDelta:
    """``index`` counts recurrent layers only: it names this layer's part of the state pool.

    qkvb: ``[H (2 dk + dv) + H, hidden]`` in that order. forget, gate: ``[r, hidden]``, then
    ``[H dk, r]`` and ``[H dv, r]``. out: ``[hidden, H dv]``.
    """

    def __init__(
        self,
        ops: Ops,
        index: int,
        qkvb: torch.Tensor,
        forget: LowRank,
        gate: LowRank,
        out: torch.Tensor,
        weights: KdaWeights,
    ) -> None:
        self._ops = ops
        self._index = index
        self._qkvb = ops.pack_linear(qkvb)
        self._forget = [ops.pack_linear(part) for part in forget]
        self._gate = [ops.pack_linear(part) for part in gate]
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_kda(weights)

    def mix(
        self, x: Array, norm: RmsNorm, context: ForwardContext, wanted: WantedTokens | None = None
    ) -> Array:
        """See ``models.decoder.Mixer``; ``[T, H dv]``."""
        ops, memory = self._ops, context.memory
        normed = ops.norm(x, norm.packed)
        projected = ops.linear(normed, self._qkvb)
        forget, gate = (
            ops.linear(ops.linear(normed, into), out_of)
            for into, out_of in (self._forget, self._gate)
        )
        conv, recurrent = memory.conv[self._index], memory.recurrent[self._index]
        mixed = ops.mix_kda(projected, forget, gate, self._weights, context.states, conv, recurrent)
        if context.trees is not None:
            ops.mix_kda_trees(
                projected, forget, gate, self._weights, context.trees, conv, recurrent,
                context.spec[self._index], mixed,
            )  # fmt: skip
        return mixed if wanted is None else ops.select(mixed, wanted.index)

    def add(self, mixed: Array, x: Array) -> Array:
        """``[T, H dv]`` of ``mix`` and x -> x + mixer(norm(x))."""
        return self._ops.linear_add(mixed, self._out, x)

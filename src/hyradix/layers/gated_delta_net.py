"""The recurrent layer. Owns: its weights. Read next: ``kernels/gated_delta_net``."""

from __future__ import annotations

import torch

from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.ops import Ops
from hyradix.layers.context import ForwardContext


class GatedDeltaNet:
    """``index`` counts recurrent layers only: it names this layer's part of the state pool.

    qkvzba: ``[2 Hk dk + 2 Hv dv + 2 Hv, hidden]`` in that order. out: ``[hidden, Hv dv]``.
    """

    def __init__(
        self, ops: Ops, index: int, qkvzba: torch.Tensor, out: torch.Tensor, weights: MixerWeights
    ) -> None:
        self._ops = ops
        self._index = index
        self._qkvzba = ops.pack_linear(qkvzba)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_mixer(weights)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """``[T, hidden]`` normalised input -> residual + mixer, ``[T, hidden]``."""
        projected = self._ops.linear(x, self._qkvzba)
        conv, recurrent = (pool[self._index] for pool in (context.memory.conv, context.memory.recurrent))
        mixed = self._ops.mix(projected, self._weights, context.states, conv, recurrent)
        return self._ops.linear(mixed, self._out, residual)

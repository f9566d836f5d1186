"""The recurrent layer of GDN and Mamba2. Owns: its weights.

Read next: ``kernels/gated_delta_net``, ``kernels/mamba2``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.attention.queries import WantedTokens
from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.norm import RmsNorm


class RecurrentMixer:
    """``index`` counts recurrent layers only: it names this layer's part of the state pool.

    inputs: rows q, k (Hk dk each), v, z (Hv dv each), then b, a (GDN) or dt (Mamba2), Hv each.
    out: ``[hidden, Hv dv]``.
    """

    def __init__(
        self,
        ops: Ops,
        index: int,
        inputs: torch.Tensor,
        out: torch.Tensor,
        weights: MixerWeights | Mamba2Weights,
    ) -> None:
        self._ops = ops
        self._index = index
        self._inputs = ops.pack_linear(inputs)
        self._out = ops.pack_linear(out)
        self._weights = ops.pack_mixer(weights)

    def mix(
        self, x: Array, norm: RmsNorm, context: ForwardContext, wanted: WantedTokens | None = None
    ) -> Array:
        """See ``models.decoder.Mixer``; ``[T, Hv dv]``."""
        projected = self._ops.norm_linear(x, norm.packed, self._inputs)
        memory = context.memory
        conv, recurrent = memory.conv[self._index], memory.recurrent[self._index]
        mixed = self._ops.mix(projected, self._weights, context.states, conv, recurrent)
        if context.trees is not None:
            spec = context.spec[self._index]
            self._ops.mix_trees(
                projected, self._weights, context.trees, conv, recurrent, spec, mixed
            )
        return mixed if wanted is None else self._ops.select(mixed, wanted.index)

    def add(self, mixed: Array, x: Array) -> Array:
        """``[T, Hv dv]`` of ``mix`` and x -> x + mixer(norm(x))."""
        return self._ops.linear_add(mixed, self._out, x)

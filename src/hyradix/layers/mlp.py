"""The feed-forward layer. Owns: its weights. Read next: ``kernels/activation``, ``moe.py``."""

from __future__ import annotations

import torch

from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.norm import RmsNorm


class Mlp:
    """up: ``[2 I, hidden]``, gates first, for swiglu; ``[I, hidden]`` for relu2.

    down: ``[hidden, I]``. scale: of what is added to x.
    """

    def __init__(
        self,
        ops: Ops,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        activation: Activation = "swiglu",
        scale: float = 1.0,
    ) -> None:
        self._ops = ops
        self._up = ops.pack_linear(up)
        self._down = ops.pack_linear(down)
        self._activation: Activation = activation
        self._scale = scale

    def forward(self, x: Array, norm: RmsNorm) -> Array:
        """``[T, hidden]`` -> x + scale MLP(norm(x)), ``[T, hidden]``."""
        hidden = self._ops.norm_linear_activate(x, norm.packed, self._up, self._activation)
        return self._finish(hidden, None, x)

    def add(self, normed: Array, weights: Array | None, x: Array) -> Array:
        """x + scale weights MLP(normed), as a shared expert; weights: ``[T, 1]`` or None for 1."""
        hidden = self._ops.activate(self._ops.linear(normed, self._up), self._activation)
        return self._finish(hidden, weights, x)

    def _finish(self, hidden: Array, weights: Array | None, x: Array) -> Array:
        if weights is not None:
            hidden *= weights
        if self._scale != 1.0:
            hidden *= self._scale
        return self._ops.linear_add(hidden, self._down, x)

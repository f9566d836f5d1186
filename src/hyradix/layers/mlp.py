"""The feed-forward layer. Owns: its weights. Read next: ``kernels/swiglu``."""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.layers.norm import RmsNorm


class Mlp:
    """gate_up: ``[2 I, hidden]``, gates first. down: ``[hidden, I]``."""

    def __init__(self, ops: Ops, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._ops = ops
        self._gate_up = ops.pack_linear(gate_up)
        self._down = ops.pack_linear(down)

    def forward(self, x: Array, norm: RmsNorm) -> Array:
        """``[T, hidden]`` -> x + MLP(norm(x)), ``[T, hidden]``."""
        gate_up = self._ops.norm_linear(x, norm.packed, self._gate_up)
        return self._ops.swiglu_linear_add(gate_up, self._down, x)

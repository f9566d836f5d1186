"""The feed-forward layer. Owns: its weights. Read next: ``kernels/swiglu``."""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Ops


class Mlp:
    """gate_up: ``[2 I, hidden]``, gates first. down: ``[hidden, I]``."""

    def __init__(self, ops: Ops, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._ops = ops
        self._gate_up = ops.pack_linear(gate_up)
        self._down = ops.pack_linear(down)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` normalised input -> residual + MLP, ``[T, hidden]``."""
        hidden = self._ops.swiglu(self._ops.linear(x, self._gate_up))
        return self._ops.linear(hidden, self._down, residual)

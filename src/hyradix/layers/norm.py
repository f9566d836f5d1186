"""Root-mean-square norm. Owns: its weight. Read next: ``kernels/rms_norm``."""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Ops


class RmsNorm:
    """weight: ``[C]``; where the checkpoint stores it zero-centred, 1 is already added."""

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight.float().contiguous()
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, C]`` -> ``[T, C]`` float32."""
        return self._ops.rms_norm(x, self._weight, self._eps)

"""Root-mean-square norm. Owns: its weight. Read next: ``kernels/rms_norm``."""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Ops


class RmsNorm:
    """weight: ``[C]``; where the checkpoint stores it zero-centred, 1 is already added.

    A norm always stands before a projection and is computed with it: ``packed`` goes to
    ``Ops.norm_linear``.
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self.packed = ops.pack_norm(weight.float(), eps)

"""Root-mean-square norms in torch. Owns: the formulas. Read next: ``compiled.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension. A zero-centred weight has its 1 added before."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm(x) * silu(gate)."""
    return rms_norm(x, weight, eps) * F.silu(gate)

"""What stands between the two products of a feed-forward layer, in torch.

Read next: ``compiled.py``.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["swiglu", "relu2"]


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """swiglu: ``[T, 2I]`` -> ``[T, I]``. relu2: the square of what is positive, ``[T, I]``."""
    return swiglu(x) if activation == "swiglu" else F.relu(x).square()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: ``[T, 2I]`` (gates, then ups) -> ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

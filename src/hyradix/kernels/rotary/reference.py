"""Rotary position embedding over the first dimensions of each head (torch).

Owns: the table of angles and the rotation. Invariant: angles are float32 products of position and
inverse frequency, as the checkpoints' own implementation has them.
"""

from __future__ import annotations

import torch


def rotary_table(length: int, rotary_dim: int, theta: float) -> torch.Tensor:
    """``float32[length, 2, rotary_dim / 2]``: cosines and sines by position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = torch.arange(length, dtype=torch.float32)[:, None] * (1.0 / theta**exponents)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [T, H, D] by ``angles`` [T, 2, R/2]: i pairs with i + R/2, the rest stay."""
    half = angles.shape[-1]
    cos, sin = angles[:, 0].unsqueeze(1), angles[:, 1].unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

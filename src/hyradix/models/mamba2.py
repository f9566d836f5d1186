"""What the families with Mamba2 layers have in common: the order of rows in their checkpoints.

Owns: turning a checkpoint's order (z, x, B, C, dt; channels x, B, C) into ours (q, k, v, then z,
dt: q is C, k is B, v is x). Does not know: config.json, names of other layers.
Read next: ``kernels/mamba2/reference.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyradix.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, "torch.Tensor"]


def recurrent_shapes(config: ModelConfig) -> Shapes:
    """The input projection of one recurrent layer."""
    rows = config.conv_channels + config.num_v_heads * (config.v_dim + 1)
    return {"mamba.in_proj.weight": (rows, config.hidden_size)}


def recurrent_input(config: ModelConfig, layer: Tensors) -> list[torch.Tensor]:
    """Take it, as parts in the order of our rows: q, k, v, z, dt."""
    values = config.num_v_heads * config.v_dim
    weight = layer.pop("mamba.in_proj.weight")
    z, mixed, dt = weight.split([values, config.conv_channels, config.num_v_heads])
    return [*channel_parts(config, mixed), z, dt]


def channel_parts(config: ModelConfig, rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows of x, B, C ``[C, ...]`` as parts q, k, v."""
    keys = config.num_k_heads * config.k_dim
    v, k, q = rows.split([config.num_v_heads * config.v_dim, keys, keys])
    return [q, k, v]

"""The mixers of ``kimi_linear`` out of flat named weights.

Owns: the order of rows in fused matrices, what is folded into weights at load.
Does not know: files, which layer is which.
Invariant: as in ``builder.py``. Each takes its weights out of ``layer``.
Read next: ``layers/kimi_delta.py``, ``layers/latent_attention.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.ops import Ops
from hyradix.layers.kimi_delta import KimiDelta
from hyradix.layers.latent_attention import LatentAttention
from hyradix.models.config import LatentConfig, ModelConfig

Tensors = dict[str, torch.Tensor]


def kimi_delta(
    config: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    index: int,
    projections: list[torch.Tensor],
    layer: Tensors,
) -> KimiDelta:
    """projections: of q, k, v, b."""

    def take(name: str) -> torch.Tensor:
        return layer.pop(f"self_attn.{name}")

    weights = KdaWeights(
        num_heads=config.num_v_heads,
        conv=torch.cat([take(f"{part}_conv1d.weight") for part in "qkv"]).squeeze(1).float(),
        rate=take("A_log").flatten().float().exp(),
        dt_bias=take("dt_bias").float(),
        norm=take("o_norm.weight").float(),
        eps=config.eps,
        lower_bound=config.decay_bound,
    )
    forget, gate = (
        (take(f"{part}_a_proj.weight").to(dtype), take(f"{part}_b_proj.weight").to(dtype))
        for part in "fg"
    )
    qkvb, out = torch.cat(projections).to(dtype), take("o_proj.weight").to(dtype)
    return KimiDelta(ops, index, qkvb, forget, gate, out, weights)


def latent_attention(
    config: ModelConfig,
    latent: LatentConfig,
    ops: Ops,
    dtype: torch.dtype,
    index: int,
    layer: Tensors,
) -> LatentAttention:
    """``kv_b_proj`` is kept in float32 (rounded to ``dtype``): it is absorbed, not multiplied."""
    kv_b = layer.pop("self_attn.kv_b_proj.weight").to(dtype).float()
    by_head = kv_b.unflatten(0, (config.num_heads, latent.nope + latent.v_dim))
    keys, values = by_head.split([latent.nope, latent.v_dim], dim=1)
    weights = LatentWeights(
        num_shared=latent.shared,
        keys=keys.contiguous(),
        values=values.contiguous(),
        norm=layer.pop("self_attn.kv_a_layernorm.weight").float(),
        eps=latent.eps,
    )
    names = ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    into = torch.cat([layer.pop(name) for name in names]).to(dtype)
    out = layer.pop("self_attn.o_proj.weight").to(dtype)
    return LatentAttention(ops, index, into, out, weights)

"""Family ``qwen3_next``: config parsing and what its checkpoints call things.

Owns: names and layouts. Does not know: files, layers' arithmetic.
It differs from ``qwen3_5`` in the recurrent projections: two matrices, rows grouped by key head.
Read next: ``qwen3_5.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyradix.models.config import CacheConfig, ModelConfig, RawConfig, eos_ids, positive
from hyradix.models.qwen3_5 import Shapes, Tensors, cache_of, parse_text

if TYPE_CHECKING:
    import torch

MODEL_TYPES: tuple[str, ...] = ("qwen3_next",)
ARCHITECTURES: tuple[str, ...] = ("Qwen3NextForCausalLM",)


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    end = eos_ids(generation, raw)
    return parse_text(raw, "qwen3_next", ARCHITECTURES[0], end, _sparse_layers(raw))


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence; a mixture of experts does not matter."""
    return cache_of(raw, "qwen3_next", ARCHITECTURES[0])


def _sparse_layers(raw: RawConfig) -> list[int]:
    """Layers whose MLP is a mixture of experts."""
    if not raw.get("num_experts", 512):
        return []
    dense = set(raw.get("mlp_only_layers") or ())
    step = positive({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step")
    count = positive(raw, "num_hidden_layers")
    return [i for i in range(count) if i not in dense and (i + 1) % step == 0]


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form, or None for what is not needed."""
    return name.replace(".mlp.shared_expert.", ".mlp.", 1)


def recurrent_shapes(config: ModelConfig) -> Shapes:
    """The input projections of one recurrent layer."""
    values = config.num_v_heads * config.v_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (config.conv_channels + values, config.hidden_size),
        "linear_attn.in_proj_ba.weight": (2 * config.num_v_heads, config.hidden_size),
    }


def recurrent_input(config: ModelConfig, layer: Tensors) -> list[torch.Tensor]:
    """Take them, in the order of their rows q, k, v, z, b, a, no longer grouped by key head."""
    heads, ratio = config.num_k_heads, config.num_v_heads // config.num_k_heads
    values = ratio * config.v_dim
    sizes = [config.k_dim, config.k_dim, values, values]
    qkvz = layer.pop("linear_attn.in_proj_qkvz.weight").unflatten(0, (heads, sum(sizes)))
    ba = layer.pop("linear_attn.in_proj_ba.weight").unflatten(0, (heads, 2 * ratio))
    parts = [*qkvz.split(sizes, dim=1), *ba.split([ratio, ratio], dim=1)]
    return [part.flatten(0, 1) for part in parts]

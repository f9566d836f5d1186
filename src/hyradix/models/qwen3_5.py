"""Family ``qwen3_5`` (text part; dense or MoE): config parsing and its checkpoints' weight names.

Owns: names and layouts. Does not know: files, layers' arithmetic.
Two forms: flat (``qwen3_5_text``, weights ``model.layers...``) and nested (``qwen3_5``, config
under ``text_config``, weights ``model.language_model.layers...`` beside a vision tower that is
skipped).
Read next: ``decoder.py``.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict
from typing import TYPE_CHECKING

from hyradix.errors import ModelLoadError
from hyradix.models.config import (
    CacheConfig,
    LayerKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    RawConfig,
    draft_sizes,
    eos_ids,
    only,
    parse_layers,
    positive,
    require,
    rope,
)

if TYPE_CHECKING:  # parsing must not load torch: the memory planner does it alone
    import torch

MODEL_TYPES: tuple[str, ...] = (
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
)
ARCHITECTURES: tuple[str, ...] = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, "torch.Tensor"]

_KINDS: dict[str, LayerKind] = {
    "linear_attention": "recurrent",
    "gated_delta_net": "recurrent",
    "full_attention": "attention",
}


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    text = _text_part(raw)
    if text is not raw:
        shared = ("tie_word_embeddings", "draft_heads")  # of the whole model, whatever text says
        text = {**text, **{key: value for key, value in raw.items() if key in shared}}
    sparse = range(positive(text, "num_hidden_layers")) if _has_experts(text) else ()
    end = eos_ids(generation, raw, text)
    text = {**text, "norm_topk_prob": True}
    return parse_text(text, "qwen3_5", _architecture(raw), end, sparse)


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence; a mixture of experts or a vision tower does not matter."""
    text = _text_part(raw)
    names = raw.get("architectures") or [_architecture(raw)]
    return cache_of(text, "qwen3_5", str(names[0]))


def _architecture(raw: RawConfig) -> str:
    text = _text_part(raw)
    return ARCHITECTURES[2 * _has_experts(text) + (text is not raw)]


def _has_experts(text: RawConfig) -> bool:
    return bool(text.get("num_experts", 0)) or "_moe" in str(text.get("model_type"))


def cache_of(text: RawConfig, family: str, architecture: str) -> CacheConfig:
    """The same keys of ``qwen3_5`` and ``qwen3_next``."""
    num_heads = positive(text, "num_attention_heads")
    config = CacheConfig(
        family=family,
        architecture=architecture,
        layers=_layers(text),
        max_position=positive(
            {"max_position_embeddings": 32_768, **text}, "max_position_embeddings"
        ),
        num_kv_heads=positive({"num_key_value_heads": num_heads, **text}, "num_key_value_heads"),
        head_dim=positive({"head_dim": 256, **text}, "head_dim"),
        num_k_heads=positive(text, "linear_num_key_heads"),
        num_v_heads=positive(text, "linear_num_value_heads"),
        k_dim=positive(text, "linear_key_head_dim"),
        v_dim=positive(text, "linear_value_head_dim"),
        conv_width=positive(text, "linear_conv_kernel_dim"),
    )
    if num_heads % config.num_kv_heads or config.num_v_heads % config.num_k_heads:
        raise ModelLoadError("config.json: query heads must be a multiple of key heads")
    return config


def parse_text(
    text: RawConfig,
    family: str,
    architecture: str,
    eos_token_ids: tuple[int, ...],
    sparse_layers: Container[int],
) -> ModelConfig:
    """The keys that ``qwen3_5`` and ``qwen3_next`` have in common.

    sparse_layers: those whose MLP is a mixture of experts.
    """
    only(text, "attention_bias", False)
    only(text, "hidden_act", "silu")
    cache = cache_of(text, family, architecture)
    theta, rotary_dim = rope(text, cache.head_dim)
    mlps: list[MlpKind] = [
        "moe" if i in sparse_layers else "dense" for i in range(len(cache.layers))
    ]
    return ModelConfig(
        **asdict(cache),
        vocab_size=positive(text, "vocab_size"),
        hidden_size=positive(text, "hidden_size"),
        mlps=tuple(mlps),
        intermediate_size=positive(text, "intermediate_size") if "dense" in mlps else 0,
        moe=_experts(text) if "moe" in mlps else None,
        has_centred_norms=True,
        eps=require({"rms_norm_eps": 1e-6, **text}, "rms_norm_eps", float),
        is_tied=bool(text.get("tie_word_embeddings", False)),
        num_heads=positive(text, "num_attention_heads"),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        eos_token_ids=eos_token_ids,
        draft_intermediate_sizes=draft_sizes(text),
    )


def _experts(text: RawConfig) -> MoeConfig:
    return MoeConfig(
        num_experts=positive(text, "num_experts"),
        top_k=positive(text, "num_experts_per_tok"),
        expert_size=positive(text, "moe_intermediate_size"),
        shared_size=positive(text, "shared_expert_intermediate_size"),
        has_shared_gate=True,
        is_normalised=bool(text.get("norm_topk_prob", True)),
    )


def _text_part(raw: RawConfig) -> RawConfig:
    text: RawConfig = require(raw, "text_config", dict) if "text_config" in raw else raw
    return text


def _layers(text: RawConfig) -> tuple[LayerKind, ...]:
    count = positive(text, "num_hidden_layers")
    interval = positive({"full_attention_interval": 4, **text}, "full_attention_interval")
    if text.get("layer_types"):
        kinds = [str(kind) for kind in require(text, "layer_types", list)]
    else:
        kinds = [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
        ]
    return parse_layers(kinds, count, _KINDS)


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form, or None for what is not needed."""
    if name.startswith(("model.visual.", "visual.")):
        return None
    name = name.replace(".mlp.shared_expert.", ".mlp.", 1)
    prefix = "model.language_model."
    return "model." + name[len(prefix) :] if name.startswith(prefix) else name


def recurrent_shapes(config: ModelConfig) -> Shapes:
    """The input projections of one recurrent layer."""
    values = config.num_v_heads * config.v_dim
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_channels, config.hidden_size),
        "linear_attn.in_proj_z.weight": (values, config.hidden_size),
        "linear_attn.in_proj_b.weight": (config.num_v_heads, config.hidden_size),
        "linear_attn.in_proj_a.weight": (config.num_v_heads, config.hidden_size),
    }


def recurrent_input(config: ModelConfig, layer: Tensors) -> list[torch.Tensor]:
    """Take them, in the order of their rows: q, k, v, z, b, a."""
    return [layer.pop(f"linear_attn.in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]

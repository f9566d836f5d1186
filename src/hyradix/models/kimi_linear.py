"""Family ``kimi_linear``: config parsing and what its checkpoints call things.

Owns: names. Does not know: files, layers' arithmetic.
Recurrent layers are Kimi delta attention, the others attend to one latent row per token, without
positions. Which layer is which stands in ``linear_attn_config``, counted from 1 (releases), or in
``layer_types`` (configs made by transformers). Both mixers are ``self_attn`` in checkpoints. A
mixture of experts is ``block_sparse_moe``, its matrices w1 (gate), w3 (up), w2 (down); some writers
put dense MLPs there too.
Read next: ``builder.py``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hyradix.errors import ModelLoadError
from hyradix.models.config import (
    CacheConfig,
    LatentConfig,
    LayerKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    RawConfig,
    eos_ids,
    number,
    only,
    parse_layers,
    positive,
    require,
)

if TYPE_CHECKING:
    import torch

MODEL_TYPES: tuple[str, ...] = ("kimi_linear",)
ARCHITECTURES: tuple[str, ...] = ("KimiLinearForCausalLM",)
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, "torch.Tensor"]

_FIXED: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "rope_scaling": (),
    "num_nextn_predict_layers": (0,),
    "moe_router_activation_func": ("sigmoid", "softmax"),
}
"""Values that are supported, beside null and no such key."""
_KINDS: dict[str, LayerKind] = {"linear_attention": "recurrent", "full_attention": "attention"}
_FLAT = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""What transformers calls the numbers of ``linear_attn_config``."""
_LATENT_EPS = 1e-6
"""The norm of latents does not follow ``rms_norm_eps``."""
_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    for key, supported in _FIXED.items():
        only(raw, key, None, *supported)
    num_heads = positive(raw, "num_attention_heads")
    if raw.get("num_key_value_heads") not in (None, num_heads):
        raise ModelLoadError("config.json: num_key_value_heads must be num_attention_heads")
    cache, mlps = parse_cache(raw), _mlps(raw)
    return ModelConfig(
        **asdict(cache),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        mlps=mlps,
        intermediate_size=positive(raw, "intermediate_size") if "dense" in mlps else 0,
        moe=_experts(raw) if "moe" in mlps else None,
        latent=LatentConfig(
            rank=positive(raw, "kv_lora_rank"),
            shared=positive(raw, "qk_rope_head_dim"),
            nope=positive(raw, "qk_nope_head_dim"),
            v_dim=positive(raw, "v_head_dim"),
            eps=_LATENT_EPS,
        ),
        decay_bound=_decay_bound(raw),
        eps=number(raw, "rms_norm_eps", 1e-5),
        is_tied=False,
        num_heads=num_heads,
        rotary_dim=0,
        rope_theta=1.0,
        eos_token_ids=eos_ids(generation, raw),
    )


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence; a mixture of experts does not matter."""
    linear = _linear(raw)
    heads, head_dim = positive(linear, "num_heads"), positive(linear, "head_dim")
    length = "model_max_length" if "model_max_length" in raw else "max_position_embeddings"
    return CacheConfig(
        family="kimi_linear",
        architecture=ARCHITECTURES[0],
        layers=_layers(raw, linear),
        max_position=positive(raw, length),
        num_kv_heads=1,
        head_dim=positive(raw, "kv_lora_rank") + positive(raw, "qk_rope_head_dim"),
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=head_dim,
        v_dim=head_dim,
        conv_width=positive(linear, "short_conv_kernel_size"),
        recurrence="kda",
        has_latent_kv=True,
    )


def _linear(raw: RawConfig) -> RawConfig:
    """``linear_attn_config``, or what transformers writes in its place, in the same words."""
    if "linear_attn_config" in raw or "layer_types" not in raw:
        given: RawConfig = require(raw, "linear_attn_config", dict)
        return given
    kinds = _listed(raw)
    places = {
        key: [i for i, kind in enumerate(kinds, 1) if kind == wanted]
        for key, wanted in (("kda_layers", "recurrent"), ("full_attn_layers", "attention"))
    }
    return {**places, **{ours: positive(raw, flat) for flat, ours in _FLAT.items()}}


def _listed(raw: RawConfig) -> tuple[LayerKind, ...]:
    kinds = [str(kind) for kind in require(raw, "layer_types", list)]
    return parse_layers(kinds, positive(raw, "num_hidden_layers"), _KINDS)


def _layers(raw: RawConfig, linear: RawConfig) -> tuple[LayerKind, ...]:
    """Both lists together must name every layer once, counted from 1."""
    count = positive(raw, "num_hidden_layers")
    attention = require(linear, "full_attn_layers", list)
    recurrent = require(linear, "kda_layers", list)
    if sorted([*attention, *recurrent]) != list(range(1, count + 1)):
        raise ModelLoadError(
            f"config.json: linear_attn_config must name each of {count} layers once, in kda_layers "
            "or in full_attn_layers, counted from 1"
        )
    layers: list[LayerKind] = [
        "attention" if i in attention else "recurrent" for i in range(1, count + 1)
    ]
    if raw.get("layer_types") and _listed(raw) != tuple(layers):
        raise ModelLoadError("config.json: layer_types and linear_attn_config name other layers")
    return tuple(layers)


def _mlps(raw: RawConfig) -> tuple[MlpKind, ...]:
    """Mixtures from layer ``first_k_dense_replace`` on, every ``moe_layer_freq``-th."""
    count = positive(raw, "num_hidden_layers")
    first = require({"first_k_dense_replace": 1, **raw}, "first_k_dense_replace", int)
    listed = raw.get("mlp_layer_types")
    if listed is not None:
        if not set(listed) <= {"dense", "sparse"} or len(listed) != count:
            raise ModelLoadError(
                f"config.json: mlp_layer_types must say dense or sparse for {count} layers"
            )
        return tuple(_mlp(kind == "sparse") for kind in listed)
    if not raw.get("num_experts"):
        return tuple(_mlp(False) for _ in range(count))
    step = positive({"moe_layer_freq": 1, **raw}, "moe_layer_freq")
    return tuple(_mlp(i >= first and i % step == 0) for i in range(count))


def _mlp(is_sparse: bool) -> MlpKind:
    return "moe" if is_sparse else "dense"


def _experts(raw: RawConfig) -> MoeConfig:
    groups: RawConfig = {"num_expert_group": 1, "topk_group": 1}
    if raw.get("use_grouped_topk", True):
        groups |= {key: raw[key] for key in groups if key in raw}
    size = positive(raw, "moe_intermediate_size")
    return MoeConfig(
        num_experts=positive(raw, "num_experts"),
        top_k=positive(raw, "num_experts_per_token"),
        expert_size=size,
        shared_size=size * require({"num_shared_experts": 0, **raw}, "num_shared_experts", int),
        scoring=raw.get("moe_router_activation_func") or "sigmoid",
        has_bias=True,
        num_groups=positive(groups, "num_expert_group"),
        top_groups=positive(groups, "topk_group"),
        is_normalised=bool(raw.get("moe_renormalize", True)),
        scale=number(raw, "routed_scaling_factor", 1.0),
    )


def _decay_bound(raw: RawConfig) -> float | None:
    linear = _linear(raw)
    if linear.get("gate_lower_bound") is None:
        return None
    bound: float = require(linear, "gate_lower_bound", float)
    if bound >= 0:
        raise ModelLoadError(f"config.json: gate_lower_bound must be negative, got {bound}")
    return bound


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form, or None for what is not needed."""
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    name = name.replace(".mlp.shared_experts.", ".mlp.", 1)
    stem, _, part = name.removesuffix(".weight").rpartition(".")
    if ".mlp.experts." in name and part in _EXPERT_PARTS:
        return f"{stem}.{_EXPERT_PARTS[part]}.weight"
    return name


def recurrent_shapes(config: ModelConfig) -> Shapes:
    """The input projections of one recurrent layer."""
    keys, values = config.num_k_heads * config.k_dim, config.num_v_heads * config.v_dim
    return {
        "self_attn.q_proj.weight": (keys, config.hidden_size),
        "self_attn.k_proj.weight": (keys, config.hidden_size),
        "self_attn.v_proj.weight": (values, config.hidden_size),
        "self_attn.b_proj.weight": (config.num_v_heads, config.hidden_size),
    }


def recurrent_input(config: ModelConfig, layer: Tensors) -> list[torch.Tensor]:
    """Take them, in the order of their rows: q, k, v, b."""
    return [layer.pop(name) for name in recurrent_shapes(config)]

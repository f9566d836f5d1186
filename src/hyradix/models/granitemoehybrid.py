"""Family ``granitemoehybrid`` (Granite 4.0-H): config parsing and its checkpoints' weight names.

Owns: names and layouts. Does not know: files, layers' arithmetic.
Mamba2 layers, a few of plain attention (most often without positions); in every layer a shared MLP,
with or without routed experts beside it; multipliers on embeddings, residuals, scores and logits.
Read next: ``mamba2.py``, ``shapes.py``.
"""

from __future__ import annotations

from dataclasses import asdict

from hyradix.errors import ModelLoadError
from hyradix.models.config import (
    CacheConfig,
    LayerKind,
    Mamba2Config,
    ModelConfig,
    MoeConfig,
    RawConfig,
    eos_ids,
    number,
    only,
    parse_layers,
    positive,
    rope,
    time_step_limits,
)
from hyradix.models.mamba2 import recurrent_input, recurrent_shapes

__all__ = ["ARCHITECTURES", "MODEL_TYPES", "map_name", "parse_cache", "parse_config",
           "recurrent_input", "recurrent_shapes"]  # fmt: skip

MODEL_TYPES: tuple[str, ...] = ("granitemoehybrid",)
ARCHITECTURES: tuple[str, ...] = ("GraniteMoeHybridForCausalLM",)
_KINDS: dict[str, LayerKind] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence."""
    count = positive(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * count
    return cache_of(raw, "granitemoehybrid", ARCHITECTURES[0], parse_layers(kinds, count, _KINDS))


def cache_of(
    raw: RawConfig, family: str, architecture: str, layers: tuple[LayerKind, ...]
) -> CacheConfig:
    """The keys that ``granitemoehybrid`` and ``bamba`` have in common."""
    heads, hidden = positive(raw, "num_attention_heads"), positive(raw, "hidden_size")
    num_v_heads = positive(raw, "mamba_n_heads")
    inner = positive({"mamba_expand": 2, **raw}, "mamba_expand") * hidden
    if raw.get("mamba_d_head", "auto") == "auto":
        raw = {**raw, "mamba_d_head": inner // num_v_heads}
    config = CacheConfig(
        family=family,
        architecture=architecture,
        layers=layers,
        recurrence="mamba2",
        max_position=positive(raw, "max_position_embeddings"),
        num_kv_heads=positive({"num_key_value_heads": heads, **raw}, "num_key_value_heads"),
        head_dim=positive({"head_dim": hidden // heads, **raw}, "head_dim"),
        num_k_heads=positive({"mamba_n_groups": 1, **raw}, "mamba_n_groups"),
        num_v_heads=num_v_heads,
        k_dim=positive(raw, "mamba_d_state"),
        v_dim=positive(raw, "mamba_d_head"),
        conv_width=positive({"mamba_d_conv": 4, **raw}, "mamba_d_conv"),
    )
    if heads % config.num_kv_heads or num_v_heads % config.num_k_heads:
        raise ModelLoadError("config.json: query heads must be a multiple of key heads")
    if num_v_heads * config.v_dim != inner:
        raise ModelLoadError(
            f"config.json: mamba_n_heads {num_v_heads} times mamba_d_head {config.v_dim} is not "
            f"mamba_expand times hidden_size, {inner}"
        )
    return config


def mamba2_of(raw: RawConfig) -> Mamba2Config:
    """The parts of a Mamba2 layer that may be missing or bounded."""
    only(raw, "mamba_proj_bias", False)
    return Mamba2Config(
        has_conv_bias=bool(raw.get("mamba_conv_bias", True)),
        dt_limits=time_step_limits(raw),
        num_norm_groups=1,
    )


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    only(raw, "attention_bias", False)
    only(raw, "hidden_act", "silu")
    only(raw, "normalization_function", "rmsnorm")
    only(raw, "position_embedding_type", None, "nope", "rope")
    cache = parse_cache(raw)
    theta, rotary_dim = 10_000.0, 0
    if raw.get("position_embedding_type") == "rope":
        theta, rotary_dim = _whole_rope(raw, cache.head_dim)
    moe, shared = _experts(raw), positive(raw, "shared_intermediate_size")
    return ModelConfig(
        **asdict(cache),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        mlps=("dense" if moe is None else "moe",) * len(cache.layers),
        intermediate_size=shared if moe is None else 0,
        moe=moe,
        has_fused_gate_up=True,
        mamba2=mamba2_of(raw),
        eps=number(raw, "rms_norm_eps", 1e-6),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        num_heads=positive(raw, "num_attention_heads"),
        attention="plain",
        attention_scale=number(raw, "attention_multiplier", 1.0),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        embedding_multiplier=number(raw, "embedding_multiplier", 1.0),
        residual_multiplier=number(raw, "residual_multiplier", 1.0),
        logits_divisor=number(raw, "logits_scaling", 1.0),
        eos_token_ids=eos_ids(generation, raw),
    )


def _whole_rope(raw: RawConfig, head_dim: int) -> tuple[float, int]:
    """Of all of a head: transformers reads no ``partial_rotary_factor`` in this family."""
    parameters = {**(raw.get("rope_parameters") or {}), "partial_rotary_factor": 1.0}
    return rope({**raw, "rope_parameters": parameters}, head_dim)


def _experts(raw: RawConfig) -> MoeConfig | None:
    if raw.get("num_local_experts", 8) == 0:
        return None
    return MoeConfig(
        num_experts=positive(raw, "num_local_experts"),
        top_k=positive(raw, "num_experts_per_tok"),
        expert_size=positive(raw, "intermediate_size"),
        shared_size=positive(raw, "shared_intermediate_size"),
    )


_NAMES = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
    "shared_mlp.input_linear.weight": "mlp.gate_up_proj.weight",
    "shared_mlp.output_linear.weight": "mlp.down_proj.weight",
}


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form."""
    for old, new in _NAMES.items():
        if name.endswith(f".{old}"):
            return name.removesuffix(old) + new
    return name

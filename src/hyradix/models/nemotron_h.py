"""Family ``nemotron_h`` (Nemotron-H, Nemotron 3): config parsing and its checkpoints' weight names.

Owns: names and the pattern of layers. Does not know: files, layers' arithmetic.
A layer is one thing only: Mamba2 (``M`` in the pattern), plain attention without positions (``*``),
an MLP (``-``) or a mixture of experts (``E``); MLPs are relu2.
Read next: ``mamba2.py``, ``shapes.py``.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from hyradix.errors import ModelLoadError
from hyradix.models.config import (
    CacheConfig,
    LayerKind,
    Mamba2Config,
    MlpKind,
    ModelConfig,
    MoeConfig,
    RawConfig,
    eos_ids,
    number,
    only,
    positive,
    time_step_limits,
)
from hyradix.models.mamba2 import recurrent_input, recurrent_shapes

__all__ = ["ARCHITECTURES", "MODEL_TYPES", "map_name", "parse_cache", "parse_config",
           "recurrent_input", "recurrent_shapes"]  # fmt: skip

MODEL_TYPES: tuple[str, ...] = ("nemotron_h",)
ARCHITECTURES: tuple[str, ...] = ("NemotronHForCausalLM",)
_BLOCKS: dict[str, tuple[LayerKind, MlpKind]] = {
    "M": ("recurrent", "none"),
    "*": ("attention", "none"),
    "-": ("none", "dense"),
    "E": ("none", "moe"),
}
_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _blocks(raw: RawConfig) -> list[tuple[LayerKind, MlpKind]]:
    """Mixer and MLP of each layer, from the list of kinds or else the pattern."""
    kinds = raw.get("layers_block_type") or raw.get("layer_types")
    letters = [_LETTERS.get(str(kind), "?") for kind in kinds or ()]
    letters = letters or list(str(raw.get("hybrid_override_pattern", "")))
    unknown = sorted(set(letters) - set(_BLOCKS))
    count = raw.get("num_hidden_layers", len(letters))
    if not letters or unknown or count != len(letters):
        raise ModelLoadError(
            f"config.json: hybrid_override_pattern must name {count} layers out of "
            f"{' '.join(_BLOCKS)} (or layers_block_type out of {', '.join(_LETTERS)}); got "
            f"{len(letters)}, unknown: {unknown}"
        )
    return [_BLOCKS[letter] for letter in letters]


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence."""
    heads = positive(raw, "num_attention_heads")
    config = CacheConfig(
        family="nemotron_h",
        architecture=ARCHITECTURES[0],
        layers=tuple(mixer for mixer, _ in _blocks(raw)),
        recurrence="mamba2",
        max_position=positive({"max_position_embeddings": 4096, **raw}, "max_position_embeddings"),
        num_kv_heads=positive({"num_key_value_heads": heads, **raw}, "num_key_value_heads"),
        head_dim=positive({"head_dim": 128, **raw}, "head_dim"),
        num_k_heads=positive(raw, "n_groups"),
        num_v_heads=positive(raw, "mamba_num_heads"),
        k_dim=positive(raw, "ssm_state_size"),
        v_dim=positive(raw, "mamba_head_dim"),
        conv_width=positive(raw, "conv_kernel"),
    )
    if heads % config.num_kv_heads or config.num_v_heads % config.num_k_heads:
        raise ModelLoadError("config.json: query heads must be a multiple of key heads")
    return config


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    for switch in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        only(raw, switch, False)
    only(raw, "tie_word_embeddings", False)
    only(raw, "mlp_hidden_act", "relu2")
    only(raw, "mamba_hidden_act", "silu")
    only(raw, "sliding_window", None)
    cache = parse_cache(raw)
    mlps = tuple(mlp for _, mlp in _blocks(raw))
    return ModelConfig(
        **asdict(cache),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        mlps=mlps,
        intermediate_size=positive(raw, "intermediate_size") if "dense" in mlps else 0,
        activation="relu2",
        moe=_experts(raw) if "moe" in mlps else None,
        mamba2=Mamba2Config(
            has_conv_bias=bool(raw.get("use_conv_bias", True)),
            dt_limits=_time_steps(raw),
            num_norm_groups=cache.num_k_heads,
        ),
        eps=number(raw, "layer_norm_epsilon", 1e-5),
        is_tied=False,
        num_heads=positive(raw, "num_attention_heads"),
        attention="plain",
        rotary_dim=0,
        rope_theta=10_000.0,
        eos_token_ids=eos_ids(generation, raw),
    )


def _time_steps(raw: RawConfig) -> tuple[float, float]:
    """At least ``time_step_min``, as transformers has it; a limit beyond that is refused."""
    least = number(raw, "time_step_min", 0.001)
    low, high = time_step_limits(raw)
    if low > least or high < math.inf:
        raise ModelLoadError(f"config.json: time_step_limit {[low, high]} is not supported")
    return least, math.inf


def _experts(raw: RawConfig) -> MoeConfig:
    only(raw, "n_shared_experts", 1)
    latent = raw.get("moe_latent_size")
    return MoeConfig(
        num_experts=positive(raw, "n_routed_experts"),
        top_k=positive(raw, "num_experts_per_tok"),
        expert_size=positive(raw, "moe_intermediate_size"),
        shared_size=positive(raw, "moe_shared_expert_intermediate_size"),
        scoring="sigmoid",
        has_bias=True,
        num_groups=positive({"n_group": 1, **raw}, "n_group"),
        top_groups=positive({"topk_group": 1, **raw}, "topk_group"),
        is_normalised=bool(raw.get("norm_topk_prob", True)),
        scale=number(raw, "routed_scaling_factor", 1.0),
        latent_size=None if latent is None else positive(raw, "moe_latent_size"),
    )


_PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn."),
    **dict.fromkeys(("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj"), "mamba."),
}


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form, or None for what is not needed."""
    if name.startswith("mtp."):
        return None
    name = name.replace("backbone.", "model.", 1)
    name = name.replace("model.embeddings.", "model.embed_tokens.", 1)
    name = name.replace("model.norm_f.", "model.norm.", 1)
    layer, _, rest = name.partition(".mixer.")
    if not rest:
        first, _, last = name.rpartition(".norm.")
        is_layer = first.startswith("model.layers.")
        return f"{first}.input_layernorm.{last}" if is_layer else name
    part, _, last = rest.partition(".")
    if part == "shared_experts":
        return f"{layer}.mlp.{last}"
    return f"{layer}.{_PARTS.get(part, 'mlp.')}{rest}"

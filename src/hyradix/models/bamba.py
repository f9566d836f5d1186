"""Family ``bamba``: config parsing and its checkpoints' weight names.

Owns: names. Does not know: files, layers' arithmetic.
Mamba2 layers, a few of plain attention with positions in half of each head; dense MLPs.
Read next: ``granitemoehybrid.py``, whose keys it shares.
"""

from __future__ import annotations

from dataclasses import asdict

from hyradix.errors import ModelLoadError
from hyradix.models.config import (
    CacheConfig,
    LayerKind,
    MlpKind,
    ModelConfig,
    RawConfig,
    eos_ids,
    number,
    only,
    positive,
    rope,
)
from hyradix.models.granitemoehybrid import cache_of, mamba2_of
from hyradix.models.mamba2 import recurrent_input, recurrent_shapes

__all__ = ["ARCHITECTURES", "MODEL_TYPES", "map_name", "parse_cache", "parse_config",
           "recurrent_input", "recurrent_shapes"]  # fmt: skip

MODEL_TYPES: tuple[str, ...] = ("bamba",)
ARCHITECTURES: tuple[str, ...] = ("BambaForCausalLM",)
_DEFAULTS: RawConfig = {
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
}


def parse_cache(raw: RawConfig) -> CacheConfig:
    """What is kept of a sequence."""
    count, places = positive(raw, "num_hidden_layers"), raw.get("attn_layer_indices") or ()
    if not all(isinstance(i, int) and 0 <= i < count for i in places):
        raise ModelLoadError(
            f"config.json: attn_layer_indices must be layers of {count}, got {places!r}"
        )
    layers: list[LayerKind] = ["attention" if i in places else "recurrent" for i in range(count)]
    return cache_of({**_DEFAULTS, **raw}, "bamba", ARCHITECTURES[0], tuple(layers))


def parse_config(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """config.json (and generation_config.json, or ``{}``) to ``ModelConfig``."""
    for switch in ("attention_bias", "mlp_bias"):
        only(raw, switch, False)
    only(raw, "hidden_act", "silu")
    cache = parse_cache(raw)
    mlps: list[MlpKind] = ["dense"] * len(cache.layers)
    theta, rotary_dim = rope({**_DEFAULTS, **raw}, cache.head_dim)
    only(raw, "attn_rotary_emb", rotary_dim)
    return ModelConfig(
        **asdict(cache),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        mlps=tuple(mlps),
        intermediate_size=positive(raw, "intermediate_size"),
        mamba2=mamba2_of(raw),
        eps=number(raw, "rms_norm_eps", 1e-5),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        num_heads=positive(raw, "num_attention_heads"),
        attention="plain",
        rotary_dim=rotary_dim,
        rope_theta=theta,
        eos_token_ids=eos_ids(generation, raw),
    )


def map_name(name: str) -> str | None:
    """A checkpoint's weight name in the flat form."""
    name = name.replace(".feed_forward.", ".mlp.").replace("final_layernorm.", "norm.")
    return name.replace(".pre_ff_layernorm.", ".post_attention_layernorm.")

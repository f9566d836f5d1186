"""Every weight that a model of a config has: flat names and shapes, layer by layer.

Owns: the flat names. A family maps its checkpoints' names to these. Does not know: files, torch.

A layer is a mixer (``self_attn.``, ``linear_attn.``, ``mamba.``), then an MLP (``mlp.``), or one
of the two.
The norm before the first is ``input_layernorm``, before the second ``post_attention_layernorm``.
In a mixture of experts ``mlp.up_proj`` and its like are the shared expert's (a dense MLP beside the
routed ones), ``mlp.gate`` is the router, and the routed experts are stacked: ``mlp.experts.*``.
Checkpoints may have them one by one (``pieces.py``).
Read next: ``builder.py``, which takes exactly these.
"""

from __future__ import annotations

from hyradix.models.config import LatentConfig, Mamba2Config, ModelConfig, MoeConfig
from hyradix.models.registry import Family

Shapes = dict[str, tuple[int, ...]]
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def expected_shapes(config: ModelConfig, family: Family) -> Shapes:
    """Every weight that a checkpoint of this config must have, by flat name."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    kinds = {kind: _layer(config, family, *kind) for kind in set(config.blocks)}
    for i, kind in enumerate(config.blocks):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in kinds[kind].items()})
    return shapes


def _layer(config: ModelConfig, family: Family, mixer: str, mlp: str) -> Shapes:
    parts = []
    if mixer == "attention":
        parts.append(_attention(config))
    elif mixer == "recurrent":
        parts.append(_recurrent(config, family))
    if mlp != "none":
        parts.append(_mlp(config, config.moe if mlp == "moe" else None))
    shapes: Shapes = {}
    for norm, part in zip(NORMS, parts, strict=False):
        shapes.update({norm: (config.hidden_size,), **part})
    return shapes


def _attention(config: ModelConfig) -> Shapes:
    if config.latent is not None:
        return _latent_attention(config, config.latent)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    is_gated = config.attention == "gated"
    shapes: Shapes = {
        "self_attn.q_proj.weight": (heads * (1 + is_gated), hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
    }
    if is_gated:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _latent_attention(config: ModelConfig, latent: LatentConfig) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    return {
        "self_attn.q_proj.weight": (heads * (latent.nope + latent.shared), hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (latent.rank + latent.shared, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.nope + latent.v_dim), latent.rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.v_dim),
    }


def _recurrent(config: ModelConfig, family: Family) -> Shapes:
    if config.mamba2 is not None:
        return _mamba2(config, config.mamba2, family)
    if config.recurrence == "kda":
        return {**family.recurrent_shapes(config), **_kda(config)}
    return {
        **family.recurrent_shapes(config),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, config.conv_width),
        "linear_attn.A_log": (config.num_v_heads,),
        "linear_attn.dt_bias": (config.num_v_heads,),
        "linear_attn.norm.weight": (config.v_dim,),
        "linear_attn.out_proj.weight": (config.hidden_size, config.num_v_heads * config.v_dim),
    }


def _mamba2(config: ModelConfig, mamba2: Mamba2Config, family: Family) -> Shapes:
    heads, values = config.num_v_heads, config.num_v_heads * config.v_dim
    shapes = {
        **family.recurrent_shapes(config),
        "mamba.conv1d.weight": (config.conv_channels, 1, config.conv_width),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.norm.weight": (values,),
        "mamba.out_proj.weight": (config.hidden_size, values),
    }
    if mamba2.has_conv_bias:
        shapes["mamba.conv1d.bias"] = (config.conv_channels,)
    return shapes


def _kda(config: ModelConfig) -> Shapes:
    hidden, heads, width = config.hidden_size, config.num_v_heads, config.conv_width
    keys, values = heads * config.k_dim, heads * config.v_dim
    return {
        "self_attn.q_conv1d.weight": (keys, 1, width),
        "self_attn.k_conv1d.weight": (keys, 1, width),
        "self_attn.v_conv1d.weight": (values, 1, width),
        "self_attn.A_log": (1, 1, heads, 1),
        "self_attn.dt_bias": (keys,),
        "self_attn.f_a_proj.weight": (config.v_dim, hidden),
        "self_attn.f_b_proj.weight": (keys, config.v_dim),
        "self_attn.g_a_proj.weight": (config.v_dim, hidden),
        "self_attn.g_b_proj.weight": (values, config.v_dim),
        "self_attn.o_norm.weight": (config.v_dim,),
        "self_attn.o_proj.weight": (hidden, values),
    }


def _mlp(config: ModelConfig, moe: MoeConfig | None) -> Shapes:
    """A dense MLP, or a mixture with its shared expert."""
    hidden = config.hidden_size
    size = config.intermediate_size if moe is None else moe.shared_size
    shapes: Shapes = {}
    if size:
        if config.has_fused_gate_up:
            shapes["mlp.gate_up_proj.weight"] = (2 * size, hidden)
        else:
            shapes["mlp.up_proj.weight"] = (size, hidden)
            if config.activation == "swiglu":
                shapes["mlp.gate_proj.weight"] = (size, hidden)
        shapes["mlp.down_proj.weight"] = (hidden, size)
    return shapes if moe is None else {**shapes, **_routed(config, moe)}


def _routed(config: ModelConfig, moe: MoeConfig) -> Shapes:
    hidden, count, size = config.hidden_size, moe.num_experts, moe.expert_size
    width = moe.latent_size or hidden
    shapes: Shapes = {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.down_proj": (count, width, size),
    }
    if config.activation == "swiglu":
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * size, width)
    else:
        shapes["mlp.experts.up_proj"] = (count, size, width)
    if moe.has_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    if moe.has_shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    if moe.latent_size:
        shapes["mlp.fc1_latent_proj.weight"] = (moe.latent_size, hidden)
        shapes["mlp.fc2_latent_proj.weight"] = (hidden, moe.latent_size)
    return shapes

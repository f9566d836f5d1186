"""Which draft heads a checkpoint has, by the names of its weights, and which of them can be used.

Owns: the names and shapes of a head's weights, the reasons to refuse one. Does not know: torch,
files, families (the names are the same in all of them).
Read next: ``draft_heads.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from hyradix.errors import ModelLoadError
from hyradix.models.config import ModelConfig

HeadName = Literal["mtp", "frozen_kv_mtp"]
HEADS: tuple[HeadName, ...] = ("mtp", "frozen_kv_mtp")
_OUTER = ("", "model.", "model.language_model.")
_REFUSALS = (
    ("layers.0.linear_attn.", "it has recurrent layers of its own, whose states nobody keeps"),
    ("layers.0.mlp.experts.", "its MLP is a mixture of experts, which is not supported yet"),
    ("layers.0.mlp.gate.", "its MLP is a mixture of experts, which is not supported yet"),
    ("layers.1.", "it has several layers; only one is supported"),
    ("embed_tokens.", "it has an embedding of its own; only a shared one is supported"),
    ("lm_head.", "it has an output head of its own; only a shared one is supported"),
)


def flat_head_name(name: str) -> str | None:
    """A head's weight name without what its family puts before it; None for other weights."""
    for outer in _OUTER:
        for head in HEADS:
            if name.startswith(f"{outer}{head}."):
                return name[len(outer) :]
    return None


def heads_in(names: Iterable[str]) -> tuple[HeadName, ...]:
    """The heads that a checkpoint with weights of these names has."""
    flat = {flat_head_name(name) for name in names}
    return tuple(head for head in HEADS if f"{head}.fc.weight" in flat)


def check_head(head: HeadName, names: Iterable[str]) -> None:
    """Raises ``ModelLoadError`` with the reason where a head is absent or of an unknown kind.

    names: flat.
    """
    own = [name[len(head) + 1 :] for name in names if name.startswith(f"{head}.")]
    if "fc.weight" not in own:
        raise ModelLoadError(f"the checkpoint has no draft head {head}: no {head}.fc.weight")
    for start, reason in _REFUSALS:
        if any(name.startswith(start) for name in own):
            raise ModelLoadError(f"the draft head {head} cannot be used: {reason}")


def random_heads(config: ModelConfig) -> tuple[HeadName, ...]:
    """The heads that can be made of random weights: those whose layer the config has."""
    has_form = config.attention == "gated" and config.latent is None
    has_form &= config.activation == "swiglu" and not config.has_fused_gate_up
    return HEADS if has_form else ()


def head_shapes(config: ModelConfig, head: HeadName) -> dict[str, tuple[int, ...]]:
    """Every weight of a head, by flat name."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    size = config.draft_intermediate_sizes.get(head, config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * heads, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads),
        "layers.0.self_attn.q_norm.weight": (config.head_dim,),
        "layers.0.mlp.gate_proj.weight": (size, hidden),
        "layers.0.mlp.up_proj.weight": (size, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, size),
    }
    if head == "mtp":
        shapes["layers.0.self_attn.k_proj.weight"] = (kv, hidden)
        shapes["layers.0.self_attn.v_proj.weight"] = (kv, hidden)
        shapes["layers.0.self_attn.k_norm.weight"] = (config.head_dim,)
    return {f"{head}.{name}": shape for name, shape in shapes.items()}

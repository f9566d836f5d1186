"""Models of every family in three sizes, with the same random weights on every backend.

``SMALL`` ones are for the interpreter too, ``CHECKPOINTS`` are those that ``tests/models`` compare
with transformers, ``REAL`` ones have the head sizes that releases have, in few layers.

Invariant: matrices hold what bfloat16 holds: a model has the same weights in either type.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from hyradix.engine.demo import demo_directory
from hyradix.kernels.ops import load_ops
from hyradix.models.decoder import Decoder
from hyradix.models.loader import (
    DTYPES,
    build_model,
    init_random,
    load_config,
    load_model,
    model_facts,
)
from hyradix.text.tokenizer import Tokenizer
from tests.support.demo import Engines

Raw = dict[str, Any]
SHARED: Raw = {"vocab_size": 29, "hidden_size": 16, "max_position_embeddings": 256,
               "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
GDN: Raw = {
    **SHARED, "intermediate_size": 24, "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip
MAMBA: Raw = {
    **SHARED, "intermediate_size": 12, "num_hidden_layers": 2, "mamba_n_heads": 4,
    "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_expand": 2,
}  # fmt: skip
KIMI: Raw = {
    "model_type": "kimi_linear", "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24,
    "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 5, "v_head_dim": 8,
    "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "routed_scaling_factor": 2.4, "model_max_length": 256,
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 6,
                           "num_heads": 2, "short_conv_kernel_size": 4},
}  # fmt: skip
SMALL: dict[str, Raw] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **GDN},
    "qwen3_next": {
        "model_type": "qwen3_next", **GDN, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **MAMBA, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", **SHARED, "intermediate_size": 24,
        "hybrid_override_pattern": "M*E-", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 6, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 8,
        "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    },
    "bamba": {"model_type": "bamba", **MAMBA, "attn_layer_indices": [1]},
    "kimi_linear": KIMI,
}  # fmt: skip
"""One recurrent layer and one of attention; a mixture of experts where the family has them."""
CHECKPOINTS = (
    "qwen3_5", "qwen3_5_conv2", "qwen3_5_moe", "qwen3_next", "qwen3_next_moe", "granite",
    "granite_dense", "nemotron_h", "nemotron_h_latent", "bamba", "kimi_linear",
    "kimi_linear_groups",
)  # fmt: skip
WIDE: Raw = {"vocab_size": 512, "hidden_size": 256, "head_dim": 128}
REAL: dict[str, Raw] = {
    "gdn 128, attention 256": {
        **SMALL["qwen3_5"], **WIDE, "intermediate_size": 384, "head_dim": 256,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "mamba2 128x64, attention 128": {
        **SMALL["granitemoehybrid"], **WIDE, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 384, "mamba_n_heads": 8, "mamba_n_groups": 1,
        "mamba_d_state": 128, "mamba_d_conv": 4,
    },
    "kda 128, mla 512+64, experts": {
        **KIMI, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384,
        "moe_intermediate_size": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 16, "num_experts_per_token": 4,
        "linear_attn_config": {**KIMI["linear_attn_config"], "head_dim": 128},
    },
}  # fmt: skip


class Models:
    """Every model once for each backend, device and type; files go under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[tuple[str | bool, ...], Decoder] = {}

    def load(
        self, kind: str, name: str, backend: str, device: str, dtype: str, *, chooses: bool = True
    ) -> Decoder:
        """kind: small, checkpoint or real. Vectors stay float32; matrices get ``dtype``.

        chooses: False: every expert is every token's, weighed as ever.
        """
        key = (kind, name, backend, device, dtype, chooses)
        if key not in self._known:
            where = self._directory / f"{kind} {name}{'' if chooses else ', all experts'}"
            is_new = not where.exists()
            where.mkdir(exist_ok=True)
            if kind == "checkpoint":
                if is_new:  # the other kinds run without transformers
                    checkpoints = importlib.import_module("tests.support.checkpoints")
                    checkpoint = checkpoints.build(name)
                    for parameter in checkpoint.parameters():
                        parameter.data = _rounded(parameter.data)
                    checkpoint.save_pretrained(where)
                    if not chooses:
                        path = where / "config.json"
                        path.write_text(json.dumps(with_all_experts(json.loads(path.read_text()))))
                model = load_model(where, backend=backend, device=device, dtype=dtype)
            else:
                raw = SMALL[name] if kind == "small" else REAL[name]
                raw = raw if chooses else with_all_experts(raw)
                (where / "config.json").write_text(json.dumps(raw))
                model = drawn(where, backend, device, dtype)
            self._known[key] = model
        return self._known[key]


class SmallEngines(Engines):
    """On a small model, whose ids are some tokenizer's."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.directory, self.dtype = Path(), "float32"
        self.tokenizer = Tokenizer.from_dir(demo_directory())
        self.facts = model_facts(model.config)

    def model(self, proposer: str | None = None) -> Decoder:
        return self._model


def drawn(
    directory: Path, backend: str, device: str, dtype: str, *, num_spoken: int = 0
) -> Decoder:
    """Weights large enough that what is said depends on all that came before.

    num_spoken: of so many tokens the output's rows are larger by far (untied): nearly all that is
    said is one of them, so that drafts are sometimes right.
    """
    config = load_config(directory)
    factor = 12.0 if config.hidden_size < 64 else 4.0 * min(1.0, 16.0 / config.hidden_size**0.5)
    weights = {
        name: _rounded(x * factor if x.ndim > 1 else x)
        for name, x in init_random(config, seed=3).items()
    }
    if num_spoken:
        weights["lm_head.weight"][:num_spoken] *= 16.0
    ops = load_ops(backend, device=device, dtype=DTYPES[dtype])
    return build_model(config, weights, ops, dtype=dtype)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Matrices to what bfloat16 holds: a model of either type has the same weights."""
    return x.bfloat16().to(x.dtype) if x.ndim > 1 else x


def with_all_experts(raw: Raw) -> Raw:
    """A config whose tokens go to every expert of every group."""
    counts = [raw.get(x) for x in ("num_experts", "n_routed_experts", "num_local_experts")]
    groups = [raw.get(x) for x in ("num_expert_group", "n_group")]
    most = {
        "num_experts_per_tok": counts, "num_experts_per_token": counts, "topk_group": groups
    }  # fmt: skip
    found = {name: next((x for x in values if x), None) for name, values in most.items()}
    return {**raw, **{name: x for name, x in found.items() if x and name in raw}}

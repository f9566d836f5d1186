"""Tiny random checkpoints of ``kimi_linear``, written by transformers."""

from __future__ import annotations

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 28,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 7,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.4,
    "model_max_length": 512,
    "pad_token_id": None,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
        "head_dim": 18,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
}
KIMI: dict[str, dict] = {
    "kimi_linear": {},
    "kimi_linear_groups": {
        "num_expert_group": 4,
        "topk_group": 2,
        "num_shared_experts": 2,
        "moe_renormalize": False,
        "linear_attn_config": {
            "kda_layers": [2, 3, 5],
            "full_attn_layers": [1, 4],
            "head_dim": 16,
            "num_heads": 5,
            "short_conv_kernel_size": 2,
        },
    },
    "kimi_linear_dense": {"first_k_dense_replace": 5},
}
"""Changes to the common config by name of the variant."""


def kimi_config(family: str) -> dict:
    """A config.json as releases have it."""
    return {"model_type": "kimi_linear", **_COMMON, **KIMI[family]}


def build_kimi(family: str, **changes):
    torch.manual_seed(0)
    config = {**kimi_config(family), **changes}
    config.pop("model_type")
    model = KimiLinearForCausalLM(KimiLinearConfig(**config))
    generator = torch.Generator().manual_seed(1)
    biases = [(name, b) for name, b in model.named_buffers() if name.endswith("correction_bias")]
    for name, tensor in [*model.named_parameters(), *biases]:
        if not name.endswith(("A_log", "dt_bias")):
            is_norm = "norm" in name
            scale = 0.3 if is_norm else 0.08
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = float(is_norm) + scale * noise
    return model.eval()

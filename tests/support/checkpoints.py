"""Tiny random checkpoints of every family, written by transformers."""

from __future__ import annotations

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 512,
}


def randomise(model: torch.nn.Module) -> None:
    """Larger weights than the initialiser's, norms included, so that mistakes show."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue
        scale = 0.3 if "norm" in name else 0.08
        offset = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = offset + scale * noise


def build(family: str):
    torch.manual_seed(0)
    if family == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, tie_word_embeddings=True))
    elif family == "qwen3_5_conv2":
        config = {**COMMON, "linear_conv_kernel_dim": 2, "num_key_value_heads": 6, "head_dim": 32,
                  "linear_key_head_dim": 33, "linear_value_head_dim": 16}  # fmt: skip
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, num_experts=0))
    randomise(model)
    return model.eval()

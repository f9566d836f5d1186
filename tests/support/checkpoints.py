"""Tiny random checkpoints of every family, written by transformers."""

from __future__ import annotations

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.kimi_checkpoints import KIMI, build_kimi

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
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}


MAMBA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 32,
}
"""Two groups but one norm over all heads."""
GRANITE = {
    **MAMBA,
    "num_hidden_layers": 5,
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
    "shared_intermediate_size": 56,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "hybrid_override_pattern": "M-ME*EM*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "n_groups": 4,
    "ssm_state_size": 33,
    "chunk_size": 32,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36,
    "routed_scaling_factor": 2.5,
    "n_group": 3,
    "topk_group": 2,
    "time_step_min": 0.3,
}
"""time_step_min is large enough to clamp."""


def randomise(model: torch.nn.Module) -> None:
    """Larger weights than the initialiser's, norms included, so that mistakes show."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue
        scale = 0.3 if "norm" in name or name.endswith(".D") else 0.08
        is_centred = isinstance(model, QWEN) and not name.endswith("linear_attn.norm.weight")
        offset = 0.0 if scale == 0.08 or is_centred else 1.0
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = offset + scale * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


QWEN = (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM)


def _build(family: str):
    torch.manual_seed(0)
    if family == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, tie_word_embeddings=True))
    elif family == "qwen3_5_conv2":
        config = {**COMMON, "linear_conv_kernel_dim": 2, "num_key_value_heads": 6, "head_dim": 32,
                  "linear_key_head_dim": 33, "linear_value_head_dim": 16}  # fmt: skip
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    elif family == "qwen3_5_moe":
        config = {k: v for k, v in COMMON.items() if k != "intermediate_size"}
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config, **EXPERTS))
    elif family == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, num_experts=0))
    elif family == "bamba":
        config = {**MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1], "mamba_d_conv": 3}
        model = BambaForCausalLM(BambaConfig(**config, pad_token_id=None))
    elif family == "granite":
        config = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3}
        model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**config))
    elif family == "granite_dense":
        config = {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0,
                  "position_embedding_type": "rope", "mamba_conv_bias": False,
                  "time_step_limit": (0.4, 1.2), "tie_word_embeddings": True}  # fmt: skip
        model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**config))
    elif family == "nemotron_h":
        model = NemotronHForCausalLM(NemotronHConfig(**NEMOTRON))
    elif family == "nemotron_h_latent":
        config = {**NEMOTRON, "moe_latent_size": 24, "n_group": 1, "topk_group": 1,
                  "hybrid_override_pattern": "EM*E", "norm_topk_prob": False}  # fmt: skip
        model = NemotronHForCausalLM(NemotronHConfig(**config))
    else:
        config = {**COMMON, **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [3],
                  "decoder_sparse_step": 2, "num_hidden_layers": 6}  # fmt: skip
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**config))
    randomise(model)
    return model.eval()


def build(family: str):
    return build_kimi(family) if family in KIMI else _build(family)

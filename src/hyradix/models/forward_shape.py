"""How much of a token is alive at once inside a forward: from the config alone.

Owns: the widest part of a layer. Does not know: batches, bytes, kernels.
Read next: ``hyradix/device_bytes.py`` (what is made of it).
"""

from __future__ import annotations

from hyradix.device_bytes import ForwardShape
from hyradix.models.config import ModelConfig


def forward_shape(config: ModelConfig) -> ForwardShape:
    """Of the target model; draft heads are narrower."""
    latent, moe = config.latent, config.moe
    expert_numbers, latent_numbers = 0, 0
    if moe is not None:
        expert_numbers = moe.top_k * (moe.expert_size + (moe.latent_size or config.hidden_size))
    if latent is not None:
        latent_numbers = config.num_heads * (2 * latent.rank + latent.shared)
    return ForwardShape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        key_heads=0 if latent is not None else config.num_kv_heads,
        v_dim=latent.rank if latent is not None else config.head_dim,
        widest=max(_attention(config), _recurrent(config), _mlp(config)),
        expert_numbers=expert_numbers,
        latent_numbers=latent_numbers,
    )


def _attention(config: ModelConfig) -> int:
    """Projected q, k, v and gates; q once more, turned; the output."""
    heads = config.num_heads * config.head_dim
    gates = heads if config.attention == "gated" else 0
    return 3 * heads + gates + 2 * config.num_kv_heads * config.head_dim


def _recurrent(config: ModelConfig) -> int:
    """Projected columns, output gates and their rates; the output."""
    values = config.num_v_heads * config.v_dim
    width = config.conv_channels + 2 * values + 2 * config.num_v_heads
    if config.recurrence == "kda":  # decays by channel, and both low-rank products
        width += 2 * config.num_k_heads * config.k_dim + values
    return width


def _mlp(config: ModelConfig) -> int:
    """What goes in, doubled where there are gates, and the product of both."""
    parts = 3 if config.activation == "swiglu" else 2
    width = parts * config.intermediate_size
    moe = config.moe
    if moe is not None:
        routed = moe.top_k * (parts * moe.expert_size + (moe.latent_size or config.hidden_size))
        width = max(width, routed + parts * moe.shared_size + 2 * moe.num_experts)
    return width

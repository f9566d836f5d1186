"""The weights of one layer, by name within it, to its mixer and MLP, fused for speed.

Owns: the order of rows in fused matrices, what is folded into weights at load (norms stored less 1,
scales of scores and residuals). Does not know: files, which layers there are, pools.
Invariant: linear weights and embeddings follow ``dtype``; norms, gates and routers are float32.
Every method takes its weights out of ``layer``.
Read next: ``shapes.py`` (the names), ``layers/``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.moe.reference import ExpertWeights, Routing
from hyradix.kernels.ops import Ops
from hyradix.layers.attention import Attention, FrozenAttention
from hyradix.layers.mlp import Mlp
from hyradix.layers.moe import Moe
from hyradix.layers.norm import RmsNorm
from hyradix.layers.recurrent import RecurrentMixer
from hyradix.models.config import Mamba2Config, ModelConfig, MoeConfig
from hyradix.models.decoder import DecoderLayer, FeedForward, Mixer
from hyradix.models.kimi_mixers import kimi_delta, latent_attention
from hyradix.models.mamba2 import channel_parts
from hyradix.models.registry import Family
from hyradix.models.shapes import NORMS

Tensors = dict[str, torch.Tensor]


class LayerBuilder:
    """angles: the rotary table of all layers."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        ops: Ops,
        dtype: torch.dtype,
        angles: torch.Tensor,
    ) -> None:
        self._config = config
        self._family = family
        self._ops = ops
        self._dtype = dtype
        self._angles = angles

    def with_dtype(self, dtype: torch.dtype) -> LayerBuilder:
        """The same, for weights of another type."""
        return LayerBuilder(self._config, self._family, self._ops, dtype, self._angles)

    def layer(self, i: int, layer: Tensors) -> DecoderLayer:
        """Layer ``i`` of the decoder."""
        mixer, mlp = self._config.blocks[i]
        index = self._config.layers[:i].count(mixer)
        norms = (self.norm(layer.pop(name)) for name in NORMS if name in layer)
        built = DecoderLayer(
            None if mixer == "none" else (next(norms), self._mixer(mixer, index, layer)),
            None if mlp == "none" else (next(norms), self._mlp(mlp, layer)),
        )
        assert not layer, f"weights that no part of the layer takes: {list(layer)}"
        return built

    def norm(self, weight: torch.Tensor, *, divisor: float = 1.0) -> RmsNorm:
        """divisor: of its output."""
        return RmsNorm(self._ops, self._centre(weight) / divisor, self._config.eps)

    def _centre(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float() + (1.0 if self._config.has_centred_norms else 0.0)

    def _mixer(self, mixer: str, index: int, layer: Tensors) -> Mixer:
        config, ops, dtype = self._config, self._ops, self._dtype
        if mixer == "attention":
            if config.latent is not None:
                return latent_attention(config, config.latent, ops, dtype, index, layer)
            return self.attention(index, layer)
        if config.mamba2 is not None:
            return self._mamba2(config.mamba2, index, layer)
        if config.recurrence == "kda":
            projections = self._family.recurrent_input(config, layer)
            return kimi_delta(config, ops, dtype, index, projections, layer)
        return self._gated_delta_net(index, layer)

    def attention(self, index: int, layer: Tensors) -> Attention:
        """index: of the part of the KV pool."""
        q, *gate = self._q_and_gate(layer)
        k, v = layer.pop("self_attn.k_proj.weight"), layer.pop("self_attn.v_proj.weight")
        out = layer.pop("self_attn.o_proj.weight").to(self._dtype)
        qkvg = torch.cat([q, k, v, *gate]).to(self._dtype)
        weights, scale = self._attention_weights(layer), self._config.residual_multiplier
        return Attention(self._ops, index, qkvg, out, weights, scale=scale)

    def frozen(self, layer: Tensors) -> FrozenAttention:
        """Attention without keys and values of its own."""
        qg = torch.cat(self._q_and_gate(layer)).to(self._dtype)
        out = layer.pop("self_attn.o_proj.weight").to(self._dtype)
        return FrozenAttention(self._ops, qg, out, self._attention_weights(layer))

    def _q_and_gate(self, layer: Tensors) -> list[torch.Tensor]:
        """Checkpoints store them head by head; q alone where there is no gate."""
        config, num_parts = self._config, 1 + (self._config.attention == "gated")
        shape = (config.num_heads, num_parts, config.head_dim, config.hidden_size)
        q_gate = layer.pop("self_attn.q_proj.weight").reshape(shape)
        return [q_gate[:, i].flatten(0, 1) for i in range(num_parts)]

    def _attention_weights(self, layer: Tensors) -> AttentionWeights:
        """A norm that is not there multiplies by 1; q's carries the scale of scores."""
        config, ones = self._config, torch.ones(self._config.head_dim)
        is_gated = config.attention == "gated"
        q_norm, k_norm = (
            self._centre(layer.pop(name)) if name in layer else ones
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        )
        if config.attention_scale is not None:
            q_norm = q_norm * (config.attention_scale * config.head_dim**0.5)
        return AttentionWeights(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            q_norm=q_norm,
            k_norm=k_norm,
            angles=self._angles,
            has_norm=is_gated,
            has_gate=is_gated,
        )

    def _mamba2(self, mamba2: Mamba2Config, index: int, layer: Tensors) -> RecurrentMixer:
        """The residual multiplier goes into the norm, which comes last before the product."""
        config = self._config
        conv = layer.pop("mamba.conv1d.weight").squeeze(1).float()
        bias = torch.zeros(len(conv))
        if mamba2.has_conv_bias:
            bias = layer.pop("mamba.conv1d.bias").float()
        weights = Mamba2Weights(
            num_k_heads=config.num_k_heads,
            conv=torch.cat(channel_parts(config, conv)),
            conv_bias=torch.cat(channel_parts(config, bias)),
            decay_rate=-layer.pop("mamba.A_log").float().exp(),
            dt_bias=layer.pop("mamba.dt_bias").float(),
            dt_limits=mamba2.dt_limits,
            skip=layer.pop("mamba.D").float(),
            norm=layer.pop("mamba.norm.weight").float() * config.residual_multiplier,
            num_norm_groups=mamba2.num_norm_groups,
            eps=config.eps,
        )
        inputs = torch.cat(self._family.recurrent_input(config, layer)).to(self._dtype)
        out = layer.pop("mamba.out_proj.weight").to(self._dtype)
        return RecurrentMixer(self._ops, index, inputs, out, weights)

    def _gated_delta_net(self, index: int, layer: Tensors) -> RecurrentMixer:
        config = self._config
        weights = MixerWeights(
            num_k_heads=config.num_k_heads,
            conv=layer.pop("linear_attn.conv1d.weight").squeeze(1).float(),
            decay_rate=-layer.pop("linear_attn.A_log").float().exp(),
            dt_bias=layer.pop("linear_attn.dt_bias").float(),
            norm=layer.pop("linear_attn.norm.weight").float(),
            eps=config.eps,
        )
        qkvzba = torch.cat(self._family.recurrent_input(config, layer)).to(self._dtype)
        out = layer.pop("linear_attn.out_proj.weight").to(self._dtype)
        return RecurrentMixer(self._ops, index, qkvzba, out, weights)

    def _mlp(self, mlp: str, layer: Tensors) -> FeedForward:
        moe = self._config.moe
        if mlp == "dense":
            return self.dense(layer)
        assert moe is not None, "a config with experts says what they are"
        return self._moe(moe, layer)

    def dense(self, layer: Tensors) -> Mlp:
        """A dense MLP, or the shared expert."""
        config, dtype = self._config, self._dtype
        if config.has_fused_gate_up:
            up = layer.pop("mlp.gate_up_proj.weight")
        else:
            up = layer.pop("mlp.up_proj.weight")
            if config.activation == "swiglu":
                up = torch.cat([layer.pop("mlp.gate_proj.weight"), up])
        down, scale = layer.pop("mlp.down_proj.weight").to(dtype), config.residual_multiplier
        return Mlp(self._ops, up.to(dtype), down, activation=config.activation, scale=scale)

    def _moe(self, moe: MoeConfig, layer: Tensors) -> Moe:
        config, dtype = self._config, self._dtype
        router = layer.pop("mlp.gate.weight").float()
        if moe.has_shared_gate:
            router = torch.cat([router, layer.pop("mlp.shared_expert_gate.weight").float()])
        routing = Routing(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            scoring=moe.scoring,
            bias=layer.pop("mlp.gate.e_score_correction_bias").float() if moe.has_bias else None,
            num_groups=moe.num_groups,
            top_groups=moe.top_groups,
            is_normalised=moe.is_normalised,
            scale=moe.scale * config.residual_multiplier,
            has_shared_gate=moe.has_shared_gate,
        )
        is_gated = config.activation == "swiglu"
        up = layer.pop(f"mlp.experts.{'gate_up_proj' if is_gated else 'up_proj'}").to(dtype)
        down = layer.pop("mlp.experts.down_proj").to(dtype)
        latent = None
        if moe.latent_size:
            into, out_of = (layer.pop(f"mlp.fc{i}_latent_proj.weight") for i in (1, 2))
            latent = into.to(dtype), out_of.to(dtype)
        return Moe(
            self._ops,
            router,
            routing,
            ExpertWeights(up, down, config.activation),
            shared=self.dense(layer) if moe.shared_size else None,
            latent=latent,
        )

"""The generic hybrid decoder: embedding, a list of (mixer, MLP) layers, final norm, head.

Owns: which layers in which order, the flat weight names, how weights are fused for speed.
Does not know: files, batches, pools' sizes.
Invariant: activations and states are float32; only linear weights and embeddings follow ``dtype``.
Read next: ``loader.py``, ``layers/``, ``draft_heads.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.ops import Array, Ops
from hyradix.kernels.rotary.reference import rotary_table
from hyradix.layers.attention import FrozenAttention, GatedAttention
from hyradix.layers.context import ForwardContext
from hyradix.layers.embedding import Embedding
from hyradix.layers.gated_delta_net import GatedDeltaNet
from hyradix.layers.mlp import Mlp
from hyradix.layers.norm import RmsNorm
from hyradix.models.config import ModelConfig
from hyradix.models.draft_heads import DraftHead, HeadLayer
from hyradix.models.head_names import HeadName
from hyradix.models.registry import Family
from hyradix.spec_config import MAX_NODES

Tensors = dict[str, torch.Tensor]


def expected_shapes(config: ModelConfig, family: Family) -> dict[str, tuple[int, ...]]:
    """Every weight that a checkpoint of this config must have, by flat name."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    kv = config.num_kv_heads * config.head_dim
    attention = {
        "self_attn.q_proj.weight": (2 * heads, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    recurrent = {
        **family.recurrent_shapes(config),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, config.conv_width),
        "linear_attn.A_log": (config.num_v_heads,),
        "linear_attn.dt_bias": (config.num_v_heads,),
        "linear_attn.norm.weight": (config.v_dim,),
        "linear_attn.out_proj.weight": (hidden, config.num_v_heads * config.v_dim),
    }
    common = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    for i, kind in enumerate(config.layers):
        layer = {**common, **(attention if kind == "attention" else recurrent)}
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _of_head(tensors: Tensors, head: HeadName | None) -> list[str]:
    return [name for name in tensors if head is not None and name.startswith(f"{head}.")]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x + mixer(norm(x)), then + mlp(norm(.))."""

    input_norm: RmsNorm
    mixer: GatedAttention | GatedDeltaNet
    mlp_norm: RmsNorm
    mlp: Mlp

    def forward(self, x: Array, context: ForwardContext) -> Array:
        """``[T, hidden]`` -> ``[T, hidden]``."""
        return self.mlp.forward(self.mixer.forward(x, self.input_norm, context), self.mlp_norm)


class Decoder:
    """A loaded model. ``config`` and ``ops`` are public; weights are not to be touched.

    ``draft_head`` shares the embedding; None unless it was asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        weight_bytes: int,
        draft_head: DraftHead | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.weight_bytes = weight_bytes
        self.draft_head = draft_head
        self._embedding = embedding
        self._layers = layers
        self._norm = norm

    def forward(self, token_ids: npt.NDArray[np.int32], context: ForwardContext) -> Array:
        """Token ids ``[T]`` -> hidden states ``[T, hidden]`` before the final norm.

        Effects: writes the KV slots and state slots that ``context`` names.
        """
        x = self._embedding.embed(token_ids)
        for layer in self._layers:
            x = layer.forward(x, context)
        return x

    def warm_up(self, context: ForwardContext) -> None:
        """Run one layer of each kind and the head: all kernels that there are."""
        tokens = np.zeros(len(context.queries.positions), np.int32)
        x = self._embedding.embed(tokens)
        for kind in ("attention", "recurrent"):
            if kind in self.config.layers:
                self._layers[self.config.layers.index(kind)].forward(x, context)
        self.logits(x)

    def normalize(self, hidden: Array) -> Array:
        """``[M, hidden]`` of ``forward`` -> h, what draft heads take: after the final norm."""
        return self.ops.norm(hidden, self._norm.packed)

    def logits(self, hidden: Array) -> torch.Tensor:
        """``[M, hidden]`` of ``forward`` -> float32 ``[M, vocab]``."""
        return self._embedding.logits(hidden, self._norm)


class DecoderBuilder:
    """Makes a ``Decoder`` out of flat named weights, which it takes out of ``tensors`` as it goes.

    ``max_context`` bounds the positions of tokens; draft nodes may stand past it.
    """

    def __init__(
        self, config: ModelConfig, family: Family, ops: Ops, dtype: torch.dtype, max_context: int
    ) -> None:
        self._config = config
        self._family = family
        self._ops = ops
        self._dtype = dtype
        self._angles = rotary_table(max_context + MAX_NODES, config.rotary_dim, config.rope_theta)

    def build(self, tensors: Tensors, head_name: HeadName | None = None) -> Decoder:
        """``tensors`` has exactly the ``expected_shapes`` and a head's; it is empty afterwards."""
        config, ops = self._config, self._ops
        head_weights = {name: tensors.pop(name) for name in _of_head(tensors, head_name)}
        weight_bytes = self._num_bytes(tensors)
        weight = tensors.pop("model.embed_tokens.weight").to(self._dtype)
        unembedding = None if config.is_tied else tensors.pop("lm_head.weight").to(self._dtype)
        embedding = Embedding(ops, weight, unembedding)
        layers = []
        for i, kind in enumerate(config.layers):
            prefix = f"model.layers.{i}."
            names = [name for name in tensors if name.startswith(prefix)]
            layer = {name[len(prefix) :]: tensors.pop(name) for name in names}
            index = config.layers[:i].count(kind)
            layers.append(self._layer(kind, index, layer))
        norm = self._norm(tensors.pop("model.norm.weight"))
        assert not tensors, "expected_shapes and build disagree"
        head = self._head(head_name, head_weights, embedding) if head_name else None
        return Decoder(config, ops, embedding, layers, norm, weight_bytes, head)

    def _num_bytes(self, tensors: Tensors) -> int:
        return sum(t.numel() for t in tensors.values()) * self._dtype.itemsize

    def _layer(self, kind: str, index: int, layer: Tensors) -> DecoderLayer:
        mixer = (
            self._attention(index, layer) if kind == "attention" else self._recurrent(index, layer)
        )
        return DecoderLayer(
            self._norm(layer["input_layernorm.weight"]),
            mixer,
            self._norm(layer["post_attention_layernorm.weight"]),
            self._mlp(layer),
        )

    def _head(self, name: HeadName, tensors: Tensors, embedding: Embedding) -> DraftHead:
        prefix = f"{name}.layers.0."
        layer = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        is_frozen = name == "frozen_kv_mtp"
        return DraftHead(
            name,
            self._ops,
            embedding,
            tensors[f"{name}.fc.weight"].to(self._dtype),
            self._norm(tensors[f"{name}.pre_fc_norm_embedding.weight"]),
            self._norm(tensors[f"{name}.pre_fc_norm_hidden.weight"]),
            HeadLayer(
                self._norm(layer["input_layernorm.weight"]),
                self._frozen(layer)
                if is_frozen
                else self._attention(self._config.num_attention_layers, layer),
                self._norm(layer["post_attention_layernorm.weight"]),
                self._mlp(layer),
            ),
            self._norm(tensors[f"{name}.norm.weight"]),
            self._num_bytes(tensors),
        )

    def _mlp(self, layer: Tensors) -> Mlp:
        gate_up = torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
        down = layer["mlp.down_proj.weight"].to(self._dtype)
        return Mlp(self._ops, gate_up.to(self._dtype), down)

    def _norm(self, weight: torch.Tensor) -> RmsNorm:
        """These checkpoints store norm weights zero-centred."""
        return RmsNorm(self._ops, 1.0 + weight.float(), self._config.eps)

    def _attention(self, index: int, layer: Tensors) -> GatedAttention:
        q, gate = self._q_and_gate(layer)
        k, v = layer["self_attn.k_proj.weight"], layer["self_attn.v_proj.weight"]
        out = layer["self_attn.o_proj.weight"].to(self._dtype)
        qkvg = torch.cat([q, k, v, gate]).to(self._dtype)
        weights = self._attention_weights(layer, layer["self_attn.k_norm.weight"])
        return GatedAttention(self._ops, index, qkvg, out, weights)

    def _frozen(self, layer: Tensors) -> FrozenAttention:
        """It has no keys to be normalised."""
        qg = torch.cat(self._q_and_gate(layer)).to(self._dtype)
        out = layer["self_attn.o_proj.weight"].to(self._dtype)
        weights = self._attention_weights(layer, torch.zeros(self._config.head_dim))
        return FrozenAttention(self._ops, qg, out, weights)

    def _q_and_gate(self, layer: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Checkpoints store them head by head."""
        config = self._config
        shape = (config.num_heads, 2, config.head_dim, config.hidden_size)
        q_gate = layer["self_attn.q_proj.weight"].reshape(shape)
        return q_gate[:, 0].flatten(0, 1), q_gate[:, 1].flatten(0, 1)

    def _attention_weights(self, layer: Tensors, k_norm: torch.Tensor) -> AttentionWeights:
        config = self._config
        return AttentionWeights(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            q_norm=1.0 + layer["self_attn.q_norm.weight"].float(),
            k_norm=1.0 + k_norm.float(),
            angles=self._angles,
        )

    def _recurrent(self, index: int, layer: Tensors) -> GatedDeltaNet:
        config = self._config
        weights = MixerWeights(
            num_k_heads=config.num_k_heads,
            conv=layer["linear_attn.conv1d.weight"].squeeze(1).float(),
            decay_rate=-layer["linear_attn.A_log"].float().exp(),
            dt_bias=layer["linear_attn.dt_bias"].float(),
            norm=layer["linear_attn.norm.weight"].float(),
            eps=config.eps,
        )
        qkvzba = torch.cat(self._family.recurrent_input(config, layer)).to(self._dtype)
        out = layer["linear_attn.out_proj.weight"].to(self._dtype)
        return GatedDeltaNet(self._ops, index, qkvzba, out, weights)

"""Flat named weights to a ``Decoder``: embedding, layers, head, and a draft head where wanted.

Owns: which weights belong to which layer. Does not know: files, batches, pools, what is in a layer.
Read next: ``layer_builder.py``, ``shapes.py`` (the names), ``decoder.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Ops
from hyradix.kernels.rotary.reference import rotary_table
from hyradix.layers.embedding import Embedding
from hyradix.models.config import ModelConfig
from hyradix.models.decoder import Decoder
from hyradix.models.draft_heads import DraftHead, HeadLayer
from hyradix.models.head_names import HeadName
from hyradix.models.layer_builder import LayerBuilder, Tensors
from hyradix.models.registry import Family
from hyradix.models.shapes import NORMS
from hyradix.spec_config import MAX_NODES


class DecoderBuilder:
    """Makes a ``Decoder`` out of flat named weights, which it takes out of ``tensors`` as it goes.

    ``max_context`` bounds the positions of tokens; draft nodes may stand past it.
    """

    def __init__(
        self, config: ModelConfig, family: Family, ops: Ops, dtype: torch.dtype, max_context: int
    ) -> None:
        self._config = config
        self._ops = ops
        self._dtype = dtype
        angles = rotary_table(max_context + MAX_NODES, config.rotary_dim, config.rope_theta)
        self._layers = LayerBuilder(config, family, ops, dtype, angles)

    def build(self, tensors: Tensors, head_name: HeadName | None = None) -> Decoder:
        """``tensors`` has exactly the ``expected_shapes`` and a head's; it is empty afterwards."""
        config, ops = self._config, self._ops
        head_weights = _take(tensors, f"{head_name}.") if head_name else {}
        weight_bytes = self._num_bytes(tensors)
        source = tensors.pop("model.embed_tokens.weight")
        unembedding = source if config.is_tied else tensors.pop("lm_head.weight")
        embedding = self._embedding(source, unembedding, self._dtype)
        layers = [
            self._layers.layer(i, _take(tensors, f"model.layers.{i}."))
            for i in range(len(config.layers))
        ]
        last = tensors.pop("model.norm.weight")
        norm = self._layers.norm(last, divisor=config.logits_divisor)
        assert not tensors, "expected_shapes and build disagree"
        head = None
        if head_name:
            dtype = self._draft_dtype(head_weights)
            head = self._head(
                head_name, head_weights, self._embedding(source, unembedding, dtype), dtype
            )
        return Decoder(config, ops, embedding, layers, norm, weight_bytes, head)

    def _num_bytes(self, tensors: Tensors) -> int:
        return sum(t.numel() for t in tensors.values()) * self._dtype.itemsize

    def _embedding(
        self, source: torch.Tensor, unembedding: torch.Tensor, dtype: torch.dtype
    ) -> Embedding:
        """``dtype``: of the matrix that gives logits; where the two are one and so are the types,
        it is kept once."""
        weight = source.to(self._dtype)
        is_one = unembedding is source and dtype == self._dtype
        return Embedding(
            self._ops,
            weight,
            None if is_one else unembedding.to(dtype),
            multiplier=self._config.embedding_multiplier,
        )

    def _draft_dtype(self, head: Tensors) -> torch.dtype:
        """What reads least for a guess: bfloat16 weights as they were stored, where the backend
        multiplies them by float32 activations."""
        is_stored_so = all(tensor.dtype == torch.bfloat16 for tensor in head.values())
        is_exact = self._ops.name == "compiled"
        return torch.bfloat16 if is_stored_so and is_exact else self._dtype

    def _head(
        self, name: HeadName, tensors: Tensors, embedding: Embedding, dtype: torch.dtype
    ) -> DraftHead:
        make, num_bytes = self._layers.with_dtype(dtype), self._num_bytes(tensors)
        layer = _take(tensors, "layers.0.")
        norms = [make.norm(layer.pop(norm)) for norm in NORMS]
        index = self._config.num_attention_layers  # its KV follows the target's
        attention = make.frozen(layer) if name == "frozen_kv_mtp" else make.attention(index, layer)
        return DraftHead(
            name,
            self._ops,
            embedding,
            tensors["fc.weight"].to(dtype),
            make.norm(tensors["pre_fc_norm_embedding.weight"]),
            make.norm(tensors["pre_fc_norm_hidden.weight"]),
            HeadLayer(norms[0], attention, norms[1], make.dense(layer)),
            make.norm(tensors["norm.weight"]),
            num_bytes,
        )


def _take(tensors: Tensors, prefix: str) -> Tensors:
    """Take all weights whose names start so, under what is left of their names."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name[len(prefix) :]: tensors.pop(name) for name in names}

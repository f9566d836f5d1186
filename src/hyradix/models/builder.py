"""Flat named weights to a ``Decoder``: embedding, layers, head, and a draft head where wanted.

Owns: which weights belong to which layer, and when each is read: just before what is built of it.
Does not know: files, batches, pools, what is in a layer.
Read next: ``layer_builder.py``, ``shapes.py`` (the names), ``decoder.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

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
from hyradix.models.stored import Source, Sources, read
from hyradix.spec_config import MAX_NODES

AnySource = TypeVar("AnySource", bound=Source)


class DecoderBuilder:
    """Makes a ``Decoder`` out of flat named weights, which it takes out of ``sources`` as it goes.

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

    def build(self, sources: Sources, head_name: HeadName | None = None) -> Decoder:
        """``sources`` has exactly the ``expected_shapes`` and a head's; it is empty afterwards."""
        config, ops = self._config, self._ops
        head_weights = _take(sources, f"{head_name}.") if head_name else {}
        weight_bytes = self._num_bytes(sources.values())
        embedding, draft_embedding = self._embeddings(sources, head_weights)
        layers = [
            self._layers.layer(i, _take(sources, f"model.layers.{i}."))
            for i in range(len(config.layers))
        ]
        last = read(sources.pop("model.norm.weight"))
        norm = self._layers.norm(last, divisor=config.logits_divisor)
        assert not sources, "expected_shapes and build disagree"
        head = None
        if head_name and draft_embedding is not None:
            head = self._head(head_name, head_weights, draft_embedding)
        return Decoder(config, ops, embedding, layers, norm, weight_bytes, head)

    def _num_bytes(self, weights: Iterable[Source]) -> int:
        return sum(math.prod(weight.shape) for weight in weights) * self._dtype.itemsize

    def _embeddings(self, sources: Sources, head: Tensors) -> tuple[Embedding, Embedding | None]:
        """The model's, and that of a draft head where there is one: one matrix gives both their
        vectors, and logits too where it is tied and of the type that they are computed in."""
        source = read(sources.pop("model.embed_tokens.weight"))
        is_tied, draft_dtype = self._config.is_tied, self._draft_dtype(head)
        weight = self._ops.pack_embedding(source.to(self._dtype).contiguous())
        unembedding = source if is_tied else read(sources.pop("lm_head.weight"))

        def embedding(dtype: torch.dtype) -> Embedding:
            is_one = is_tied and dtype == self._dtype
            return Embedding(
                self._ops,
                weight,
                None if is_one else unembedding.to(dtype),
                multiplier=self._config.embedding_multiplier,
            )

        own = embedding(self._dtype)
        of_head = own if draft_dtype == self._dtype else embedding(draft_dtype)
        return own, of_head if head else None

    def _draft_dtype(self, head: Tensors) -> torch.dtype:
        """What reads least for a guess: bfloat16 weights as they were stored, where the backend
        multiplies them by float32 activations."""
        is_stored_so = all(tensor.dtype == torch.bfloat16 for tensor in head.values())
        is_exact = self._ops.name == "compiled"
        return torch.bfloat16 if is_stored_so and is_exact else self._dtype

    def _head(self, name: HeadName, tensors: Tensors, embedding: Embedding) -> DraftHead:
        dtype, num_bytes = self._draft_dtype(tensors), self._num_bytes(tensors.values())
        make = self._layers.with_dtype(dtype)
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


def _take(sources: dict[str, AnySource], prefix: str) -> Tensors:
    """Read all weights whose names start so; they go by what is left of their names."""
    names = [name for name in sources if name.startswith(prefix)]
    return {name[len(prefix) :]: read(sources.pop(name)) for name in names}

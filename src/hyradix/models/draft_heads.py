"""Draft heads: a small decoder layer that guesses the tokens after next from the target's hidden.

Owns: ``DraftHead`` and how it is made. Does not know: who keeps which hidden state, trees, slots.

x = fc(cat[rms(embed(t_i)); rms(h_{i-1})]) goes through one layer; its output, normalised, is the
hidden state of the next step, and gives logits through the target's own embedding and head.
``mtp`` has K and V of its own, one pair per token. ``frozen_kv_mtp`` has queries only: it attends
to what the target wrote.
Source: DESIGN section 6. Read next: ``spec_decode/mtp.py``, ``spec_decode/frozen_kv_mtp.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.attention import Attention, FrozenAttention
from hyradix.layers.embedding import Embedding
from hyradix.layers.mlp import Mlp
from hyradix.layers.norm import RmsNorm
from hyradix.models.head_names import HeadName


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """x + attention(norm(x)), then + mlp(norm(.)); the memory is an argument."""

    input_norm: RmsNorm
    attention: Attention | FrozenAttention
    mlp_norm: RmsNorm
    mlp: Mlp


class DraftHead:
    """fc: ``[hidden, 2 hidden]``, the embedding's columns first. The embedding is the target's."""

    def __init__(
        self,
        name: HeadName,
        ops: Ops,
        embedding: Embedding,
        fc: torch.Tensor,
        embedding_norm: RmsNorm,
        hidden_norm: RmsNorm,
        layer: HeadLayer,
        norm: RmsNorm,
        weight_bytes: int,
    ) -> None:
        self.name = name
        self.ops = ops
        self.weight_bytes = weight_bytes
        self.hidden_size = fc.shape[0]
        self._embedding = embedding
        of_embedding, of_hidden = fc.split(self.hidden_size, dim=1)
        self._of_embedding = ops.pack_linear(of_embedding.contiguous())
        self._of_hidden = ops.pack_linear(of_hidden.contiguous())
        self._embedding_norm = embedding_norm
        self._hidden_norm = hidden_norm
        self._layer = layer
        self._norm = norm

    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        hidden: Array,
        queries: RaggedQueries,
        k: Array,
        v: Array,
    ) -> Array:
        """Tokens ``[T]`` and the hidden states before them ``[T, hidden]`` -> ``[T, hidden]``.

        The result is not normalised yet. k, v: ``[slots, Hkv, D]`` of the head's layer, or, for
        ``frozen_kv_mtp``, a read-only view of the target's last attention layer.
        Effects: ``mtp`` writes the slots that ``queries`` names.
        """
        ops, layer = self.ops, self._layer
        embedded = self._embedding.embed(token_ids)
        x = ops.norm_linear(embedded, self._embedding_norm.packed, self._of_embedding)
        x = ops.linear_add(ops.norm(hidden, self._hidden_norm.packed), self._of_hidden, x)
        x = layer.attention.attend(x, layer.input_norm, queries, k, v)
        return layer.mlp.forward(x, layer.mlp_norm)

    def normalize(self, x: Array) -> Array:
        """``[T, hidden]`` of ``forward`` -> the hidden state that the next step takes."""
        return self.ops.norm(x, self._norm.packed)

    def logits(self, x: Array) -> torch.Tensor:
        """``[M, hidden]`` of ``forward`` -> float32 ``[M, vocab]``."""
        return self._embedding.logits(x, self._norm)

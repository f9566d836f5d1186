"""Token ids to vectors, and vectors to logits. Owns: both weights, which may be one."""

from __future__ import annotations

import torch

from hyradix.kernels.ops import Ops


class Embedding:
    """weight: ``[vocab, hidden]``; head: the same shape, or None where it is tied to ``weight``."""

    def __init__(self, ops: Ops, weight: torch.Tensor, head: torch.Tensor | None) -> None:
        self._ops = ops
        self._weight = weight.contiguous()
        self._head = ops.pack_linear(self._weight if head is None else head)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 or int32 ``[T]`` -> float32 ``[T, hidden]``."""
        return self._weight.index_select(0, token_ids).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised ``[M, hidden]`` -> float32 ``[M, vocab]``."""
        return self._ops.linear(hidden, self._head)

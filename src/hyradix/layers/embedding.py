"""Token ids to vectors, and vectors to logits. Owns: both weights, which may be one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.layers.norm import RmsNorm


class Embedding:
    """weight: ``[vocab, hidden]``; head: the same shape, or None where it is tied to ``weight``.

    multiplier: of the vectors, not of the logits.
    """

    def __init__(
        self,
        ops: Ops,
        weight: torch.Tensor,
        head: torch.Tensor | None,
        *,
        multiplier: float = 1.0,
    ) -> None:
        self._ops = ops
        self._multiplier = multiplier
        self._weight = ops.pack_embedding(weight.contiguous())
        self._head = ops.pack_linear(self._weight if head is None else head)

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Array:
        """``[T]`` -> ``[T, hidden]``."""
        x = self._ops.embed(self._weight, token_ids)
        return x if self._multiplier == 1.0 else x * self._multiplier

    def logits(
        self, hidden: Array, norm: RmsNorm, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[M, hidden]``, not normalised yet -> float32 ``[M, vocab]``, in ``out`` if given."""
        return self._ops.logits(hidden, norm.packed, self._head, out=out)

"""A mixture of experts on numpy arrays: all small experts in one compiled call, large ones by BLAS.

Owns: the packed weights, the temporary arrays, the choice of the product.
Does not know: layers, models.
Invariant: as ``reference.py``; what a token gets does not depend on the choice beyond rounding.
Read next: ``compiled.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.linear import compiled as linear_kernels
from hyradix.kernels.moe import compiled as kernels
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing

Array = npt.NDArray[np.float32]
_NOTHING: Array = np.zeros((0, 0), np.float32)


class StackedLinear:
    """Weights ``[E, O, I]``, one product per expert."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()
        is_plain = weight.dtype == torch.float32
        self._array: Any = (self._weight if is_plain else self._weight.view(torch.uint16)).numpy()
        self._max_rows = linear_kernels.MAX_ROWS if linear_kernels.is_supported() else 0
        self.num_outputs = weight.shape[1]

    def multiply(self, x: Array, offsets: npt.NDArray[np.int64]) -> Array:
        """x ``[M, I]``, expert by expert, -> ``[M, O]``."""
        out = np.empty((x.shape[0], self.num_outputs), np.float32)
        counts = np.diff(offsets)
        is_small = counts <= self._max_rows
        small = np.flatnonzero(is_small & (counts > 0))
        if len(small):
            kernels.multiply(self._array, small, offsets, x, out)
        for expert in np.flatnonzero(~is_small).tolist():
            rows = slice(offsets[expert], offsets[expert + 1])
            weight = self._weight[expert]
            product = torch.from_numpy(x[rows]).to(weight.dtype) @ weight.T
            out[rows] = product.float().numpy()
        return out


class PackedExperts:
    """Both matrices of all experts of one layer."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.num_experts = weights.up.shape[0]
        self.activation = weights.activation
        self.up = StackedLinear(weights.up)
        self.down = StackedLinear(weights.down)


class PackedRouting:
    """A ``Routing`` in the form that ``kernels.route`` takes."""

    def __init__(self, routing: Routing) -> None:
        self.top_k = routing.top_k
        self.num_shared = int(routing.has_shared_gate)
        bias = torch.zeros(0) if routing.bias is None else routing.bias.float().contiguous()
        self.arguments = (
            routing.scoring == "softmax",
            bias.numpy(),
            routing.num_groups,
            routing.top_groups,
            routing.is_normalised,
            np.float32(routing.scale),
        )


def route(logits: Array, routing: PackedRouting) -> Routes:
    """See ``reference.route``."""
    num_tokens = logits.shape[0]
    ids = np.empty((num_tokens, routing.top_k), np.int64)
    weights = np.empty((num_tokens, routing.top_k), np.float32)
    shared = np.empty((num_tokens, routing.num_shared), np.float32)
    kernels.route(logits, *routing.arguments, ids, weights, shared)
    return Routes(ids, weights, shared if routing.num_shared else None)


class Grouping:
    """Tokens expert by expert. order: ``int64[T k]`` tokens; places: ``int64[T, k]``."""

    def __init__(self, ids: npt.NDArray[np.int64], num_experts: int) -> None:
        self.order = np.empty(ids.size, np.int64)
        self.places = np.empty(ids.shape, np.int64)
        self.offsets = np.empty(num_experts + 1, np.int64)
        kernels.group(ids, num_experts, self.order, self.places, self.offsets)


def combine(y: Array, grouping: Grouping, weights: Array, residual: Array | None) -> Array:
    """residual + each token's weighted sum of the rows of ``y`` ``[T k, H]``."""
    out = np.empty((len(weights), y.shape[1]), np.float32)
    kernels.combine(y, grouping.places, weights, _NOTHING if residual is None else residual, out)
    return out

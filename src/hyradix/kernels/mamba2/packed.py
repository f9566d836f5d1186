"""The compiled mixer of Mamba2 as an object: packed weights, and the choice of threads.

Owns: layouts that ``compiled.py`` takes. Does not know: layers, models.
Read next: ``compiled.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.mamba2 import compiled as kernels
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.mamba2.tree_reference import mix_trees
from hyradix.kernels.tree_recurrence.layer_reference import as_tensors
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

Array = npt.NDArray[np.float32]


class PackedMamba2:
    """Convolution weights as ``[K, C]``, then the small vectors."""

    def __init__(self, weights: Mamba2Weights) -> None:
        self._weights = weights
        self._num_k_heads = weights.num_k_heads
        self._conv = tuple(x.contiguous().numpy() for x in (weights.conv.T, weights.conv_bias))
        vectors = (weights.decay_rate, weights.dt_bias)
        self._rest = (
            *(x.contiguous().numpy() for x in vectors),
            *(np.float32(limit) for limit in weights.dt_limits),
            *(x.contiguous().numpy() for x in (weights.skip, weights.norm)),
            weights.num_norm_groups,
            np.float32(weights.eps),
        )

    def mix(
        self,
        projected: Array,
        batch: RaggedStates,
        conv_state: Array,
        state: Array,
        *,
        parallel_from: float,
    ) -> Array:
        """``reference.mix``; on one thread up to ``parallel_from`` elements of work."""
        num_tokens = projected.shape[0]
        mixed = np.empty((num_tokens, conv_state.shape[2]), np.float32)
        out = np.empty((num_tokens, state.shape[1] * state.shape[3]), np.float32)
        is_large = out.size * state.shape[2] > parallel_from
        kernel = kernels.mix_parallel if is_large else kernels.mix_serial
        kernel(
            projected, batch.cu_seqlens, batch.slots, self._num_k_heads, *self._conv, conv_state,
            *self._rest, state, batch.save_offsets, batch.save_at, batch.save_slots, mixed, out,
        )  # fmt: skip
        return out

    def mix_trees(
        self,
        projected: Array,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        """``tree_reference.mix_trees``: trees have no compiled form here yet."""
        mix_trees(
            torch.from_numpy(projected),
            self._weights,
            trees,
            torch.from_numpy(conv_state),
            torch.from_numpy(state),
            as_tensors(spec),
            torch.from_numpy(out),
        )

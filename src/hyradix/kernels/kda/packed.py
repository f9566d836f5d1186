"""The compiled mixer of Kimi delta attention as an object: packed weights, the choice of threads.

Owns: layouts that ``compiled.py`` takes. Does not know: layers, models.
Read next: ``compiled.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.kda import compiled as kernels
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.kda.tree_reference import mix_trees
from hyradix.kernels.tree_recurrence.layer_reference import as_tensors
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

Array = npt.NDArray[np.float32]


class PackedKda:
    """Convolution weights as ``[H, K, channels of a head]``, then the small vectors."""

    def __init__(self, weights: KdaWeights) -> None:
        self._weights = weights
        heads, dv = weights.num_heads, weights.norm.numel()
        key_dim = (weights.conv.shape[0] - heads * dv) // 2
        pieces = weights.conv.split([key_dim, key_dim, heads * dv])
        by_head = [x.unflatten(0, (heads, -1)).transpose(1, 2) for x in pieces]
        self._conv = torch.cat(by_head, dim=2).contiguous().numpy()
        vectors = (weights.rate, weights.dt_bias, weights.norm)
        scalars = (np.float32(weights.eps), np.float32(weights.lower_bound or 0.0))
        self._rest = (*(x.contiguous().numpy() for x in vectors), *scalars)

    def mix(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        batch: RaggedStates,
        conv_state: Array,
        state: Array,
        *,
        parallel_from: float,
    ) -> Array:
        """``reference.mix``; on one thread up to ``parallel_from`` elements of work."""
        out = np.empty_like(gate)
        is_large = out.size * state.shape[2] > parallel_from
        kernel = kernels.mix_parallel if is_large else kernels.mix_serial
        kernel(
            projected, forget, gate, batch.cu_seqlens, batch.slots, self._conv, conv_state, state,
            *self._rest, batch.save_offsets, batch.save_at, batch.save_slots, out,
        )  # fmt: skip
        return out

    def mix_trees(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        """``tree_reference.mix_trees``: trees have no compiled form here yet."""
        mix_trees(
            torch.from_numpy(projected),
            torch.from_numpy(forget),
            torch.from_numpy(gate),
            self._weights,
            trees,
            torch.from_numpy(conv_state),
            torch.from_numpy(state),
            as_tensors(spec),
            torch.from_numpy(out),
        )

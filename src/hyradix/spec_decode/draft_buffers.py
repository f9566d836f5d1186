"""The buffers of draft verification: allocated once, seen by layer, addressed by request row.

Owns: the tensors that ``state_bytes.buffers`` lists, where columns stand in them, what a step's
trees see of them. Does not know: which mode keeps what, acceptance.

Invariants:
- Allocated bytes are ``state_bytes.spec_bytes(..).peak``.
- Request row r has buffer row r + 1; buffer row 0 is a sink.
Read next: ``state_keeping.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hyradix.kernels.memory import physical_bytes, upload
from hyradix.kernels.ops import Ops
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.request import Int32Array
from hyradix.state_bytes import RecurrentShape, SpecShape, SpecStateMode, buffers, spec_bytes


@dataclass(frozen=True, slots=True)
class StatePoolTensors:
    """recurrent ``[L_r, num_states+1, Hv, K, V]``, conv ``[.., K-1, C]``, and with ``mtp`` hidden
    ``[num_states+1, H]``: the last hidden state at each state's depth."""

    recurrent: torch.Tensor
    conv: torch.Tensor
    hidden: torch.Tensor | None


class DraftBuffers:
    """What all modes have: tensors, layers, columns."""

    def __init__(
        self,
        mode: SpecStateMode,
        ops: Ops,
        shape: RecurrentShape,
        spec: SpecShape,
        pool: StatePoolTensors,
    ) -> None:
        wanted = {buffer.name: buffer for buffer in buffers(mode, shape, spec)}
        dtypes = {ops.dtype.itemsize: ops.dtype, 4: torch.float32}
        self._tensors = {
            name: torch.empty(x.shape, device=ops.device, dtype=dtypes[x.element_bytes])
            for name, x in wanted.items()
        }
        self._device = ops.device
        self.num_bytes = physical_bytes(*self._tensors.values())
        assert self.num_bytes == spec_bytes(mode, shape, spec).peak, "computed wrongly"
        self.width = shape.conv_width
        self.num_log_rows = spec.num_log_rows if mode == "log" else 0
        self.is_sliding = mode == "snapshot" and spec.is_chain
        self.first_row = 0 if self.is_sliding else self.width - 1
        self.first_node = self.width - 2 if self.is_sliding else self.first_row + self.num_log_rows
        self.hidden = self._tensors.get("hidden")
        self._pool_hidden = pool.hidden
        views = {name: ops.view(x) for name, x in self._tensors.items() if name != "hidden"}
        self.arrays = StateArrays(ops.view(pool.recurrent), ops.view(pool.conv), **views)
        self.layers = tuple(self._layer(mode, ops, layer) for layer in range(shape.num_layers))

    def _layer(self, mode: SpecStateMode, ops: Ops, layer: int) -> SpecLayer:
        tensors = {name: x for name, x in self._tensors.items() if name != "hidden"}
        shared = mode == "replay"  # one buffer of states, which every layer reuses
        views = {
            name: ops.view(x if shared and name == "states" else x[layer])
            for name, x in tensors.items()
        }
        return SpecLayer(
            mode=mode,
            first_node=self.first_node,
            num_base_columns=self.width - 2 if self.is_sliding else 0,
            num_log_rows=self.num_log_rows,
            **views,
        )

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        num_log_rows: Int32Array,
    ) -> RaggedTrees:
        """What recurrent layers need of a step's trees.

        Raises: ``ValueError`` in the sliding layout for a tree that is no chain.
        """
        if self.is_sliding:
            _check_chains(trees)
            nodes = trees.depths[:, None] + np.arange(-1, self.width - 1, dtype=np.int32)
            taps = nodes.astype(np.int32)  # column -1: the oldest of the base's window
        else:
            taps = taps_of(
                trees,
                num_log_rows,
                width=self.width,
                first_node=self.first_node,
                first_row=self.first_row,
            )
        return RaggedTrees(trees, first_token, slots, rows + np.int32(1), num_log_rows, taps)

    def hidden_to(self, moves: Moves) -> None:
        """The last hidden state that goes with each move of ``moves.counts`` held rows, if any."""
        if self._pool_hidden is None or self.hidden is None:
            return
        rows, last, targets = (
            upload(x.astype(np.int64), self._device)
            for x in (moves.rows, moves.counts - 1, moves.targets)
        )
        self._pool_hidden[targets] = self.hidden[rows, last]


def _check_chains(trees: FlatTrees) -> None:
    numbers = np.arange(len(trees.parents)) - np.repeat(
        trees.cu_nodes[:-1], np.diff(trees.cu_nodes)
    )
    if not np.array_equal(trees.parents, numbers - 1):
        raise ValueError("sliding convolution windows need chains (topk 1), and a node branches")

"""Mode ``snapshot``: every node's state was written; to keep is to copy the last accepted one's.

Owns: which node goes to which slot. Invariant: nothing is ever pending: the pool is up to date.
Source: DESIGN section 6. Read next: ``../kernels/tree_recurrence/keeping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees
from hyradix.request import Int32Array, StateFold, StateSave
from hyradix.spec_decode.draft_buffers import DraftBuffers, StatePoolTensors
from hyradix.spec_decode.judged import (
    Reached,
    accepted,
    last_nodes,
    moves_of,
    reached,
    run_lengths,
)


class SnapshotKeeper:
    """See ``state_keeping.StateKeeper``."""

    def __init__(self, ops: Ops, buffers: DraftBuffers, pool: StatePoolTensors) -> None:
        self.layers = buffers.layers
        self.num_bytes = buffers.num_bytes
        self._ops = ops
        self._buffers = buffers
        self._hidden = pool.hidden

    def enter(self, row: int) -> None:
        """Nothing is pending."""

    def begin(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> None:
        """Nothing is pending."""

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
    ) -> RaggedTrees:
        """No log rows."""
        return self._buffers.arrange(trees, first_token, rows, slots, starts * 0)

    def keep(
        self,
        trees: RaggedTrees,
        starts: Int32Array,
        paths: Sequence[Int32Array],
        saves: Sequence[StateSave],
        hidden: Array | None,
    ) -> None:
        """Copy states and windows; the working slot last, its window is a source until then."""
        counts = run_lengths(paths)
        for runs in (reached(trees, starts, counts, saves), accepted(trees, counts)):
            if len(runs):
                self._copy(trees, paths, runs, hidden)

    def _copy(
        self, trees: RaggedTrees, paths: Sequence[Int32Array], runs: Reached, hidden: Array | None
    ) -> None:
        nodes = last_nodes(paths, runs)
        flat = trees.trees.cu_nodes[runs.trees] + nodes
        taps = trees.taps[flat, 1:]
        self._ops.copy_nodes(self._buffers.arrays, moves_of(trees, runs, nodes, taps))
        if self._hidden is not None:
            assert hidden is not None, "the pool holds hidden states"
            node, slot = (
                torch.from_numpy(x).to(self._ops.device, torch.long) for x in (flat, runs.slots)
            )
            self._hidden[slot] = self._ops.tensor(hidden)[node]

    def fold(self, folds: Sequence[StateFold]) -> None:
        """The state is at its depth already."""

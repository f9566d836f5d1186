"""Mode ``replay``: the accepted tokens' inputs are held and run into the state one round later.

Owns: how many inputs a row holds and on which depth they stand. Does not know: where nodes' states
came from during the verify.

Invariant: a row's held inputs are the first ``held`` of its buffer row, in order, and continue its
working state, which stands at ``depth``.
Source: DESIGN section 6. Read next: ``../kernels/tree_recurrence/keeping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.kernels.tree_recurrence.keeping import Moves
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, window_taps
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.request import Int32Array, StateFold, StateSave
from hyradix.spec_decode.draft_buffers import DraftBuffers
from hyradix.spec_decode.judged import reached, run_lengths


class ReplayKeeper:
    """See ``state_keeping.StateKeeper``."""

    def __init__(
        self,
        ops: Ops,
        rule: Rule,
        buffers: DraftBuffers,
        num_requests: int,
    ) -> None:
        self.layers = buffers.layers
        self.num_bytes = buffers.num_bytes
        self._ops = ops
        self._rule = rule
        self._buffers = buffers
        self._held = np.zeros(num_requests, np.int32)
        self._depth = np.zeros(num_requests, np.int32)

    def enter(self, row: int) -> None:
        """Nothing is held."""
        self._held[row] = 0

    def begin(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> None:
        """All that is held goes into the working states."""
        index = np.flatnonzero(self._held[rows])
        if not len(index):
            return
        rows, slots = rows[index], slots[index]
        held = self._held[rows]
        assert np.array_equal(self._depth[rows] + held, starts[index]), "held of another depth"
        self._replay(rows, slots, slots, held)
        self._held[rows] = 0

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
    ) -> RaggedTrees:
        """No log rows, and the held ones are in the state."""
        assert not self._held[rows].any(), "begin has not run"
        return self._buffers.arrange(trees, first_token, rows, slots, starts * 0)

    def keep(
        self,
        trees: RaggedTrees,
        starts: Int32Array,
        paths: Sequence[Int32Array],
        saves: Sequence[StateSave],
        hidden: Array | None,
    ) -> None:
        """Compact the accepted inputs and columns; saves are replayed into their slots."""
        counts, rows = run_lengths(paths), trees.rows - 1
        self._compact(trees, paths)
        if self._buffers.hidden is not None:
            assert hidden is not None, "the pool holds hidden states"
            self._hold_hidden(trees, paths, self._ops.tensor(hidden))
        self._held[rows], self._depth[rows] = counts, starts
        due = reached(trees, starts, counts, saves)
        if len(due):
            self._replay(rows[due.trees], trees.slots[due.trees], due.slots, due.counts)

    def _compact(self, trees: RaggedTrees, paths: Sequence[Int32Array]) -> None:
        """Accepted nodes move to the front; a path ascends, so nothing is overwritten unread."""
        moved = [
            (row, node, to)
            for row, path in zip(trees.rows.tolist(), paths, strict=True)
            for to, node in enumerate(path.tolist())
            if node != to
        ]
        if not moved:
            return
        rows, sources, targets = np.array(moved, np.int32).T.copy()
        arrays, column = self._buffers.arrays, np.int32(self._buffers.first_node)
        for array in (arrays.k, arrays.v, arrays.g, arrays.beta):
            self._ops.move_rows(array, rows, sources, targets)
        self._ops.move_rows(arrays.conv, rows, sources + column, targets + column)

    def _hold_hidden(
        self, trees: RaggedTrees, paths: Sequence[Int32Array], hidden: torch.Tensor
    ) -> None:
        assert self._buffers.hidden is not None
        for tree, path in enumerate(paths):
            nodes = torch.from_numpy(trees.trees.cu_nodes[tree] + path)
            nodes = nodes.to(self._ops.device, torch.long)
            self._buffers.hidden[int(trees.rows[tree]), : len(path)] = hidden[nodes]

    def fold(self, folds: Sequence[StateFold]) -> None:
        """Replay up to the depth; the rest is dropped."""
        for fold in folds:
            count = fold.depth - int(self._depth[fold.row]) if self._held[fold.row] else 0
            assert 0 <= count <= self._held[fold.row], "a fold outside of what is held"
            self._held[fold.row] = 0
            if count:
                row, slot, held = np.array([[fold.row], [fold.slot], [count]], np.int32)
                self._replay(row, slot, slot, held)

    def _replay(
        self, rows: Int32Array, sources: Int32Array, targets: Int32Array, counts: Int32Array
    ) -> None:
        """States of ``sources`` run on by the rows' first ``counts`` (at least 1) held inputs."""
        buffers = self._buffers
        taps = window_taps(counts, width=buffers.width, first_row=buffers.first_node)
        moves = Moves(sources, targets, rows + np.int32(1), counts, taps)
        self._ops.replay(self._rule, buffers.arrays, moves)
        buffers.hidden_to(moves)

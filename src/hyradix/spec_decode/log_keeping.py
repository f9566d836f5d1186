"""Mode ``log``: accepted rows are appended to a log on the state and folded in when it is full.

Owns: how many rows a request has logged and on which depth they stand; when they are folded.
Does not know: the recurrence.

Invariants:
- A row's log continues its working state (the base), which stands at ``depth``: the request has
  consumed depth + logged tokens.
- A fold in ``begin`` goes no further than the committed depth.
Source: DESIGN section 6.1. Read next: ``../kernels/tree_recurrence/keeping.py``.
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
from hyradix.state_bytes import SpecShape


class LogKeeper:
    """See ``state_keeping.StateKeeper``."""

    def __init__(
        self,
        ops: Ops,
        rule: Rule,
        buffers: DraftBuffers,
        spec: SpecShape,
    ) -> None:
        self.layers = buffers.layers
        self.num_bytes = buffers.num_bytes
        self._ops = ops
        self._rule = rule
        self._buffers = buffers
        self._max_accepted = spec.max_accepted
        self._logged = np.zeros(spec.num_requests, np.int32)
        self._depth = np.zeros(spec.num_requests, np.int32)

    def enter(self, row: int) -> None:
        """The log is empty."""
        self._logged[row] = 0

    def begin(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> None:
        """Fold where another round might not fit."""
        logged = self._logged[rows]
        is_full = logged + self._max_accepted > self._buffers.num_log_rows
        index = np.flatnonzero(is_full & (logged > 0))
        if not len(index):
            return
        rows, slots, logged = rows[index], slots[index], logged[index]
        assert np.array_equal(self._depth[rows] + logged, starts[index]), "a log of another depth"
        counts = np.minimum(committed[index] - self._depth[rows], logged).astype(np.int32)
        left = logged - counts
        assert (left + self._max_accepted <= self._buffers.num_log_rows).all(), (
            "the log is full of rows that are not committed"
        )
        self._fold(rows, slots, slots, counts)
        self._drop(rows, counts, left)

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
    ) -> RaggedTrees:
        """The log rows are ancestors of every node."""
        logged = self._logged[rows]
        self._depth[rows] = np.where(logged > 0, self._depth[rows], starts)
        assert np.array_equal(self._depth[rows] + logged, starts), "a log of another depth"
        return self._buffers.arrange(trees, first_token, rows, slots, logged)

    def keep(
        self,
        trees: RaggedTrees,
        starts: Int32Array,
        paths: Sequence[Int32Array],
        saves: Sequence[StateSave],
        hidden: Array | None,
    ) -> None:
        """Append the accepted rows; saves are folded into their slots."""
        counts, rows = run_lengths(paths), trees.rows - 1
        logged = self._logged[rows] + counts
        assert (logged <= self._buffers.num_log_rows).all(), "a log is too short for its round"
        nodes = [path + first for path, first in zip(paths, trees.trees.cu_nodes, strict=False)]
        taken = np.concatenate([*nodes, np.zeros(0, np.int32)])
        if len(taken):
            self._append(trees, counts, np.concatenate(paths).astype(np.int32), taken, hidden)
        self._logged[rows] = logged
        due = reached(trees, starts, counts, saves)
        if len(due):
            total = trees.num_log_rows[due.trees] + due.counts
            self._fold(rows[due.trees], trees.slots[due.trees], due.slots, total)

    def _append(
        self,
        trees: RaggedTrees,
        counts: Int32Array,
        nodes: Int32Array,
        taken: Int32Array,
        hidden: Array | None,
    ) -> None:
        """Rows R + node to the log's end, one after the other; ``taken``: among all nodes."""
        buffers, rows = self._buffers, np.repeat(trees.rows, counts)
        ends = np.cumsum(counts, dtype=np.int32)
        order = np.arange(len(nodes), dtype=np.int32) - np.repeat(ends - counts, counts)
        targets = np.repeat(self._logged[trees.rows - 1], counts) + order
        sources, column = nodes + np.int32(buffers.num_log_rows), np.int32(buffers.first_row)
        if not (self._ops.appends_roots and trees.trees.are_roots):
            for array in (buffers.arrays.k, buffers.arrays.u, buffers.arrays.g):
                self._ops.move_rows(array, rows, sources, targets)
            self._ops.move_rows(buffers.arrays.conv, rows, sources + column, targets + column)
        if buffers.hidden is not None:
            assert hidden is not None, "the pool holds hidden states"
            row, target, node = (
                torch.from_numpy(x).to(self._ops.device, torch.long) for x in (rows, targets, taken)
            )
            buffers.hidden[row, target] = self._ops.tensor(hidden)[node]

    def fold(self, folds: Sequence[StateFold]) -> None:
        """Fold up to the depth; the rest is dropped."""
        for fold in folds:
            logged = int(self._logged[fold.row])
            count = fold.depth - int(self._depth[fold.row]) if logged else 0
            assert 0 <= count <= logged, "a fold outside of the log"
            self._logged[fold.row] = 0
            if count:
                row, slot, counts = np.array([[fold.row], [fold.slot], [count]], np.int32)
                self._fold(row, slot, slot, counts)

    def _fold(
        self, rows: Int32Array, sources: Int32Array, targets: Int32Array, counts: Int32Array
    ) -> None:
        """States of ``sources`` with the rows' first ``counts`` (at least 1) log rows folded in."""
        buffers = self._buffers
        taps = window_taps(counts, width=buffers.width, first_row=buffers.first_row)
        moves = Moves(sources, targets, rows + np.int32(1), counts, taps)
        self._ops.fold(self._rule, buffers.arrays, moves)
        buffers.hidden_to(moves)

    def _drop(self, rows: Int32Array, counts: Int32Array, left: Int32Array) -> None:
        """The first ``counts`` rows are folded: what follows moves to the front."""
        self._logged[rows] = left
        self._depth[rows] += counts
        total = int(left.sum())
        if not total:
            return
        buffers, ends = self._buffers, np.cumsum(left, dtype=np.int32)
        targets = np.arange(total, dtype=np.int32) - np.repeat(ends - left, left)
        sources, moved = targets + np.repeat(counts, left), np.repeat(rows + np.int32(1), left)
        for array in (buffers.arrays.k, buffers.arrays.u, buffers.arrays.g):
            self._ops.move_rows(array, moved, sources, targets)
        column = np.int32(buffers.first_row)
        self._ops.move_rows(buffers.arrays.conv, moved, sources + column, targets + column)
        if buffers.hidden is not None:
            hidden = self._ops.view(buffers.hidden).reshape(1, *buffers.hidden.shape)
            self._ops.move_rows(hidden, moved, sources, targets)

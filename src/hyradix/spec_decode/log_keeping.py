"""Mode ``log``: accepted rows are appended to a log on the state and folded in when it is full.

Owns: performing folds, appends and drops on the draft buffers.
Does not know: the recurrence, how far a fold may go (``log_counts.py``).

Source: DESIGN section 6.1. Read next: ``log_counts.py``, ``../kernels/tree_recurrence/keeping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyradix.kernels.memory import upload
from hyradix.kernels.ops import Array, Ops
from hyradix.kernels.tree_recurrence.keeping import Moves
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, window_taps
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.request import Int32Array, StateFold, StateSave
from hyradix.spec_decode.draft_buffers import DraftBuffers
from hyradix.spec_decode.judged import reached, run_lengths
from hyradix.spec_decode.log_counts import Folding, LogCounts
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
        self._log = LogCounts(spec.num_requests, buffers.num_log_rows, spec.max_accepted)

    def enter(self, row: int) -> None:
        """The log is empty."""
        self._log.enter(row)

    def begin(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> None:
        """Fold where another round might not fit."""
        due = self._log.make_room(rows, slots, starts, committed)
        if due is not None:
            self._fold(due.rows, due.slots, due.slots, due.counts)
            self._drop(due)

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
    ) -> RaggedTrees:
        """The log rows are ancestors of every node."""
        logged = self._log.arrange(rows, starts)
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
        logged = self._log.logged(rows)
        self._log.append(rows, counts)
        nodes = [path + first for path, first in zip(paths, trees.trees.cu_nodes, strict=False)]
        taken = np.concatenate([*nodes, np.zeros(0, np.int32)])
        if len(taken):
            path = np.concatenate(paths).astype(np.int32)
            self._append(trees, counts, logged, path, taken, hidden)
        due = reached(trees, starts, counts, saves)
        if len(due):
            total = trees.num_log_rows[due.trees] + due.counts
            self._fold(rows[due.trees], trees.slots[due.trees], due.slots, total)

    def _append(
        self,
        trees: RaggedTrees,
        counts: Int32Array,
        logged: Int32Array,
        nodes: Int32Array,
        taken: Int32Array,
        hidden: Array | None,
    ) -> None:
        """Rows R + node to the log's end, one after the other; ``taken``: among all nodes."""
        buffers, rows = self._buffers, np.repeat(trees.rows, counts)
        ends = np.cumsum(counts, dtype=np.int32)
        order = np.arange(len(nodes), dtype=np.int32) - np.repeat(ends - counts, counts)
        targets = np.repeat(logged, counts) + order
        sources, column = nodes + np.int32(buffers.num_log_rows), np.int32(buffers.first_row)
        if not (self._ops.appends_roots and trees.trees.are_roots):
            for array in (buffers.arrays.k, buffers.arrays.u, buffers.arrays.g):
                self._ops.move_rows(array, rows, sources, targets)
            self._ops.move_rows(buffers.arrays.conv, rows, sources + column, targets + column)
        if buffers.hidden is not None:
            assert hidden is not None, "the pool holds hidden states"
            row, target, node = (
                upload(x.astype(np.int64), self._ops.device) for x in (rows, targets, taken)
            )
            buffers.hidden[row, target] = self._ops.tensor(hidden)[node]

    def fold(self, folds: Sequence[StateFold]) -> None:
        """Fold up to the depth; the rest is dropped."""
        due = self._log.fold(folds)
        if len(due):
            self._fold(due.rows, due.slots, due.slots, due.counts)

    def _fold(
        self, rows: Int32Array, sources: Int32Array, targets: Int32Array, counts: Int32Array
    ) -> None:
        """States of ``sources`` with the rows' first ``counts`` (at least 1) log rows folded in."""
        buffers = self._buffers
        taps = window_taps(counts, width=buffers.width, first_row=buffers.first_row)
        moves = Moves(sources, targets, rows + np.int32(1), counts, taps)
        self._ops.fold(self._rule, buffers.arrays, moves)
        buffers.hidden_to(moves)

    def _drop(self, due: Folding) -> None:
        """The first ``counts`` rows are folded: what follows moves to the front."""
        rows, counts, left = due.rows, due.counts, due.left
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

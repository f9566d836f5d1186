"""What was accepted of a step's trees, as rows of movements between buffers and state slots.

Owns: which saves an accepted run reaches; the arrays of one ``Moves``. Does not know: modes.
Read next: ``snapshot_keeping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyradix.kernels.tree_recurrence.keeping import Moves
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.request import Int32Array, StateSave


@dataclass(frozen=True, slots=True)
class Reached:
    """trees: ``int32[J]`` numbers of the trees. slots: ``int32[J]`` where a state goes. counts:
    ``int32[J]`` nodes of the tree's path that it has consumed, at least 1."""

    trees: Int32Array
    slots: Int32Array
    counts: Int32Array

    def __len__(self) -> int:
        return len(self.trees)


def reached(
    trees: RaggedTrees, starts: Int32Array, counts: Int32Array, saves: Sequence[StateSave]
) -> Reached:
    """The saves that lie on the accepted runs of ``counts`` ``int32[M]`` nodes."""
    if not saves:
        return Reached(*np.zeros((3, 0), np.int32))
    index = {row - 1: i for i, row in enumerate(trees.rows.tolist())}
    found = [
        (index[save.row], save.slot, save.depth - int(starts[index[save.row]]))
        for save in saves
        if save.row in index
    ]
    due = [entry for entry in found if 0 < entry[2] <= counts[entry[0]]]
    return Reached(*np.array(due, np.int32).reshape(-1, 3).T.copy())


def accepted(trees: RaggedTrees, counts: Int32Array) -> Reached:
    """Each tree's whole run, to its working slot; trees that nothing was taken of are left out."""
    index = np.flatnonzero(counts).astype(np.int32)
    return Reached(index, trees.slots[index], counts[index])


def run_lengths(paths: Sequence[Int32Array]) -> Int32Array:
    """How many nodes each path has: ``int32[M]``."""
    return np.array([len(path) for path in paths], np.int32)


def last_nodes(paths: Sequence[Int32Array], runs: Reached) -> Int32Array:
    """The node at which each run ends: ``int32[J]``, numbers within its tree."""
    ends = zip(runs.trees.tolist(), runs.counts.tolist(), strict=True)
    return np.array([paths[tree][count - 1] for tree, count in ends], np.int32)


def moves_of(trees: RaggedTrees, runs: Reached, counts: Int32Array, taps: Int32Array) -> Moves:
    """From the runs' trees to their slots."""
    sources, rows = trees.slots[runs.trees], trees.rows[runs.trees]
    return Moves(sources, runs.slots, rows, counts, np.ascontiguousarray(taps))

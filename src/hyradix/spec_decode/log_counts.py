"""How many rows each request has logged: the integers of mode ``log``, without any tensor.

Owns: counts and depths of the logs, which folds are due and how far they go.
Does not know: buffers, devices, who performs what is decided here.

Invariants:
- A row's log continues its working state (the base), which stands at ``depth``: the request has
  consumed depth + logged tokens.
- A fold that makes room goes no further than the committed depth.
Read next: ``log_keeping.py`` (the synchronous performer), ``runner/device_log.py`` (the other one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyradix.request import Int32Array, StateFold


@dataclass(frozen=True, slots=True)
class Folding:
    """Folds in place, all ``int32[J]``: request rows, their working slots, how many of the first
    log rows go into the base (at least 1), and how many rows stay behind them."""

    rows: Int32Array
    slots: Int32Array
    counts: Int32Array
    left: Int32Array

    def __len__(self) -> int:
        return len(self.rows)


class LogCounts:
    """For ``num_requests`` request rows with logs of ``num_log_rows``."""

    def __init__(self, num_requests: int, num_log_rows: int, max_accepted: int = 1) -> None:
        self._num_log_rows = num_log_rows
        self._max_accepted = max_accepted
        self._logged = np.zeros(num_requests, np.int32)
        self._depth = np.zeros(num_requests, np.int32)

    def enter(self, row: int) -> None:
        """A request enters ``row``: its log is empty."""
        self._logged[row] = 0

    def logged(self, rows: Int32Array) -> Int32Array:
        """Valid log rows of each request row."""
        return self._logged[rows]

    def make_room(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> Folding | None:
        """Fold the logs in which another round might not fit; None where all have room.

        Effects: the folds count as done.
        """
        logged = self._logged[rows]
        is_full = logged + self._max_accepted > self._num_log_rows
        index = np.flatnonzero(is_full & (logged > 0))
        if not len(index):
            return None
        rows, slots, logged = rows[index], slots[index], logged[index]
        assert np.array_equal(self._depth[rows] + logged, starts[index]), "a log of another depth"
        counts = np.minimum(committed[index] - self._depth[rows], logged).astype(np.int32)
        left = logged - counts
        assert (left + self._max_accepted <= self._num_log_rows).all(), (
            "the log is full of rows that are not committed"
        )
        self._logged[rows] = left
        self._depth[rows] += counts
        return Folding(rows, slots, counts, left)

    def arrange(self, rows: Int32Array, starts: Int32Array) -> Int32Array:
        """``int32[M]`` valid log rows, the ancestors of what is computed from ``starts`` on."""
        logged = self._logged[rows]
        self._depth[rows] = np.where(logged > 0, self._depth[rows], starts)
        assert np.array_equal(self._depth[rows] + logged, starts), "a log of another depth"
        return logged

    def append(self, rows: Int32Array, counts: Int32Array) -> None:
        """``counts`` ``int32[M]`` rows were written behind each log's valid ones."""
        logged = self._logged[rows] + counts
        assert (logged <= self._num_log_rows).all(), "a log is too short for its round"
        self._logged[rows] = logged

    def fold(self, folds: Sequence[StateFold]) -> Folding:
        """Fold up to each depth and drop the rest; folds of nothing are left out.

        Effects: the logs are empty.
        """
        found = []
        for fold in folds:
            logged = int(self._logged[fold.row])
            count = fold.depth - int(self._depth[fold.row]) if logged else 0
            assert 0 <= count <= logged, "a fold outside of the log"
            self._logged[fold.row] = 0
            if count:
                found.append((fold.row, fold.slot, count, 0))
        return Folding(*np.array(found, np.int32).reshape(-1, 4).T.copy())

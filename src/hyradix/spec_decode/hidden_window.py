"""What a draft layer missed while nobody was to draft: the target's hidden states, for later.

Owns: the hidden states, before the final norm, of the last steps in which rows were passed over.
Does not know: slots, who proposes.

A layer that keeps up with a row step by step costs a part of each step, and all for nothing where
no drafts come of it. So a row may be passed over for next to nothing; once it is followed again,
the layer runs over what it missed in one go, and drafts as well as if it had never been away. What
stands further back than some dozens of tokens hardly matters to it: with the demo model a row whose
prompt was passed over has .1 fewer drafts accepted of 3.9; one that comes back without its last 48
tokens has 2.2 fewer at first.
Invariant: what is taken for a row has no gap, is of the request in it, and ends where it starts.
Read next: ``proposer.py``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.request import Int32Array, Int64Array

WINDOW = 64
"""Steps, and of a step with more than one token of a row, tokens."""


@dataclass(slots=True)  # not frozen: one is made in every step
class _Step:
    number: int
    rows: Int32Array
    ends: Int32Array
    counts: Int32Array | None
    """None: one each."""
    raw: Array

    def columns(self) -> tuple[Int32Array, Int32Array]:
        """Row and position of each hidden state."""
        if self.counts is None:
            return self.rows, self.ends - np.int32(1)
        total = np.cumsum(self.counts, dtype=np.int32)
        each = np.arange(total[-1], dtype=np.int32)
        return np.repeat(self.rows, self.counts), each + np.repeat(self.ends - total, self.counts)


class HiddenWindow:
    """Of ``num_rows`` rows of a request table. Cost of a step: it is remembered, nothing else.

    Holds at most ``2 * num_rows * WINDOW`` hidden states: twice what can be asked for, so that what
    rows have no use for any more is sorted out only where many short requests come and go.
    """

    def __init__(self, num_rows: int, ops: Ops) -> None:
        self._ops = ops
        self._steps: deque[_Step] = deque()
        self._number = self._num_held = 0
        self._most_held = 2 * num_rows * WINDOW
        self._entered = np.zeros(num_rows, np.int64)
        self._ends = np.full(num_rows, -1, np.int32)
        """Where each row was last passed over, if it was not followed since."""

    def enter(self, row: int) -> None:
        """A request begins in ``row``."""
        self._entered[row], self._ends[row] = self._number, -1

    def pass_over(
        self, rows: Int32Array, ends: Int32Array, raw: Array, counts: Int32Array | None = None
    ) -> None:
        """The last ``counts`` positions before ``ends`` went by; raw: ``[sum counts, hidden]``.

        counts: 1 to ``WINDOW`` each; None: all 1. Each row is named once. ``raw`` is kept, and must
        not be written later.
        """
        self._ends[rows] = ends
        self._steps.append(_Step(self._number, rows, ends, counts, raw))
        self._number += 1
        self._num_held += len(raw)
        while len(self._steps) > WINDOW:
            self._num_held -= len(self._steps.popleft().raw)
        if self._num_held > self._most_held:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Keep the last ``WINDOW`` of each request that is being passed over, and nothing else."""
        kept = (self._live_part(step) for step in self._steps)
        self._steps = deque(step for step in kept if len(step.raw))
        self._num_held = sum(len(step.raw) for step in self._steps)

    def _live_part(self, step: _Step) -> _Step:
        owners, positions = step.columns()
        ends = self._ends[owners]
        is_live = (positions < ends) & (positions >= ends - WINDOW)
        is_live &= self._entered[owners] <= step.number
        if is_live.all():
            return step
        counts = np.ones(len(step.rows), np.int32) if step.counts is None else step.counts
        places = np.repeat(np.arange(len(step.rows)), counts)[is_live]
        counts = np.bincount(places, minlength=len(step.rows)).astype(np.int32)
        has_any = counts > 0
        raw = self._ops.select(step.raw, np.flatnonzero(is_live).astype(np.int32))
        return _Step(step.number, step.rows[has_any], step.ends[has_any], counts[has_any], raw)

    def has_any(self, rows: Int32Array, starts: Int32Array) -> bool:
        """Whether something was missed by any of these."""
        return bool((self._ends[rows] == starts).any())

    def take(self, rows: Int32Array, starts: Int32Array) -> tuple[Array, Int32Array]:
        """What each row missed right before ``starts``: ``[sum counts, hidden]``, and the counts.

        Effects: it is not given out again.
        """
        owners, positions, numbers = self._columns()
        counts = np.zeros(len(rows), np.int32)
        found: list[Int64Array] = []
        for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            if self._ends[row] == start:
                mine = np.flatnonzero((owners == row) & (numbers >= self._entered[row]))
                is_next = positions[mine] == np.arange(start - len(mine), start)
                counts[i] = min(int(is_next[::-1].cumprod().sum()), WINDOW)
                found.append(mine[len(mine) - counts[i] :])
                self._ends[row] = -1
        raw = torch.cat([self._ops.tensor(step.raw) for step in self._steps])
        index = torch.from_numpy(np.concatenate(found)).to(raw.device)
        return self._ops.view(raw.index_select(0, index)), counts

    def _columns(self) -> tuple[Int32Array, Int32Array, Int64Array]:
        """Row, position and step of everything held, in the order of the steps."""
        rows, positions = zip(*(step.columns() for step in self._steps), strict=True)
        numbers = np.array([step.number for step in self._steps], np.int64)
        lengths = [len(part) for part in rows]
        return np.concatenate(rows), np.concatenate(positions), np.repeat(numbers, lengths)

"""What a draft layer missed while nobody was to draft: the target's hidden states, for later.

Owns: of each row that is passed over, the last ``WINDOW`` hidden states, before the final norm.
Does not know: slots, who proposes.

A layer that keeps up with a row step by step costs a part of a step each time, and all for nothing
where no drafts come of it. So a row may be passed over at the price of a copy; once it is followed
again, the layer runs over the window in one go and drafts as well as if it had never been away:
what stands further back than some dozens of tokens hardly matters to it (with the demo model .1 of
3.9 accepted drafts; a row that is followed again without its last 48 tokens has 1.6 at first).
Invariant: a row's window ends where the row was last passed over, and has no gap.
Read next: ``proposer.py``.
"""

from __future__ import annotations

import numpy as np
import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.request import Int32Array

WINDOW = 64


class HiddenWindow:
    """For ``num_rows`` rows of a request table; ``hidden_size`` numbers of ``ops.dtype`` each."""

    def __init__(self, num_rows: int, hidden_size: int, ops: Ops) -> None:
        self._ops = ops
        self._held = torch.zeros(num_rows * WINDOW, hidden_size, device=ops.device, dtype=ops.dtype)
        self._counts = np.zeros(num_rows, np.int32)
        self._ends = np.zeros(num_rows, np.int32)

    def clear(self, row: int) -> None:
        """A request begins in ``row``."""
        self._counts[row] = 0

    def pass_over(self, rows: Int32Array, ends: Int32Array, counts: Int32Array, raw: Array) -> None:
        """Positions ends - counts .. ends - 1 of each row went by; raw: ``[sum counts, hidden]``.

        counts: 1 to ``WINDOW``, the last of those that went by. Each row is named at most once.
        """
        is_next = self._ends[rows] == ends - counts
        held = np.where(is_next, self._counts[rows], 0) + counts
        self._counts[rows] = np.minimum(held, WINDOW)
        self._ends[rows] = ends
        owners, positions = rows, ends - 1
        if len(raw) > len(rows):
            owners, positions = _spread(rows, ends, counts)
        self._held.index_copy_(0, self._places(owners, positions), self._ops.tensor(raw))

    def count(self, rows: Int32Array, starts: Int32Array) -> Int32Array:
        """How many positions before ``starts`` are held, of each row."""
        counts: Int32Array = np.where(self._ends[rows] == starts, self._counts[rows], 0)
        return counts

    def take(self, rows: Int32Array, counts: Int32Array) -> Array:
        """The last ``counts`` of each row, ``[sum counts, hidden]``; they are held no longer."""
        owners, positions = _spread(rows, self._ends[rows], counts)
        self._counts[rows] = 0
        return self._ops.view(self._held.index_select(0, self._places(owners, positions)))

    def _places(self, rows: Int32Array, positions: Int32Array) -> torch.Tensor:
        places = rows.astype(np.int64) * WINDOW + positions % WINDOW
        return torch.from_numpy(places).to(self._ops.device)


def _spread(
    rows: Int32Array, ends: Int32Array, counts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Row and position of each of the ``counts`` positions before ``ends``."""
    total = np.cumsum(counts, dtype=np.int32)
    positions = np.arange(int(total[-1]), dtype=np.int32) + np.repeat(ends - total, counts)
    return np.repeat(rows, counts), positions

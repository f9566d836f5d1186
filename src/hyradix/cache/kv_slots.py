"""Which KV slots are free: an allocator that prefers ascending runs.

Owns: the free set of the KV pool. Does not know: who holds a slot (rows and tree nodes do).
Invariants: slot 0 is the sink and never handed out; a slot is handed out to one owner at a time
(``free`` of a free slot is an assertion failure); slots given back by ``free`` while a step is
being built are first handed out in the next one (``begin_step``), those of ``reclaim`` at once.
Read next: ``state_slots.py``.
"""

from __future__ import annotations

import numpy as np

from hyradix.request import Int32Array


class KVSlots:
    """Free slots are kept sorted in ``_sorted[_head:]``; returned ones are merged when needed.

    Cost: amortised O(log n) a slot; a merge sorts once per pool turn-over.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_total = num_slots
        self._sorted: Int32Array = np.arange(1, num_slots + 1, dtype=np.int32)
        self._head = 0
        self._returned: list[Int32Array] = []
        self._num_returned = 0
        self._quarantine: list[Int32Array] = []
        self._is_free = np.ones(num_slots + 1, dtype=np.bool_)
        self._is_free[0] = False

    @property
    def num_available(self) -> int:
        """Slots that ``allocate`` could hand out now."""
        return len(self._sorted) - self._head + self._num_returned

    @property
    def num_free(self) -> int:
        """Slots nobody owns, quarantined ones included."""
        return self.num_available + sum(len(part) for part in self._quarantine)

    def begin_step(self) -> None:
        """A new step is being built: slots freed before this point may be handed out."""
        for part in self._quarantine:
            self._put(part)
        self._quarantine.clear()

    def allocate(self, count: int) -> Int32Array:
        """``int32[count]`` slots, ascending where possible. The caller has checked the number."""
        assert count <= self.num_available, (count, self.num_available)
        if count > len(self._sorted) - self._head:
            self._merge()
        slots = self._sorted[self._head : self._head + count].copy()
        self._head += count
        self._is_free[slots] = False
        return slots

    def free(self, slots: Int32Array) -> None:
        """Take slots back; they are handed out again from the next step on."""
        if len(slots):
            self._mark(slots)
            self._quarantine.append(slots)

    def reclaim(self, slots: Int32Array) -> None:
        """Take back slots that no step being built can name (evicted ones); usable at once."""
        if len(slots):
            self._mark(slots)
            self._put(slots)

    def is_free(self, slots: Int32Array) -> bool:
        """Whether any of ``slots`` is free (for ``check()``)."""
        return bool(self._is_free[slots].any())

    def _mark(self, slots: Int32Array) -> None:
        assert int(slots.min()) > 0, "the sink is never freed"
        assert not self._is_free[slots].any(), "KV slot freed twice"
        self._is_free[slots] = True

    def _put(self, slots: Int32Array) -> None:
        self._returned.append(slots)
        self._num_returned += len(slots)

    def _merge(self) -> None:
        self._sorted = np.sort(np.concatenate([self._sorted[self._head :], *self._returned]))
        self._head = 0
        self._returned.clear()
        self._num_returned = 0

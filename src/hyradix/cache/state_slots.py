"""Life of a state slot: the one file that owns its transitions (DESIGN 2.1).

    free --take_working--> working --donate--> checkpoint --evict/drop--> free
    free --take_pending--> pending --publish--> checkpoint
    checkpoint --adopt--> working          (moved instead of copied, when slots are short)
    working, pending --release--> free     (aborted, superseded, duplicate)
    pending --reclaim--> free              (a committed track, for somebody's working state)

Owns: the phase of every slot, the depth a pending or checkpoint slot stands for, and the step
that writes a pending one. Does not know: nodes, rows, tensors.
Invariants: slot 0 is the sink, never handed out; ``publish`` only after the writing step has been
committed; a slot released while a step is being built is first handed out in the next one unless
it was a checkpoint (nobody writes those, and sources are protected by locks).
Read next: ``tree.py``.
"""

from __future__ import annotations

import enum

import numpy as np


class SlotPhase(enum.IntEnum):
    """Who owns the slot."""

    FREE = 0
    WORKING = 1
    PENDING = 2
    CHECKPOINT = 3


class StateSlots:
    """Allocator and life-cycle of the state pool. All operations are O(1)."""

    def __init__(self, num_slots: int) -> None:
        self.num_total = num_slots
        self.phase = np.zeros(num_slots + 1, dtype=np.int8)
        self.depth = np.full(num_slots + 1, -1, dtype=np.int64)
        self.step = np.full(num_slots + 1, -1, dtype=np.int64)
        self._free = list(range(num_slots, 0, -1))
        self._quarantine: list[int] = []

    @property
    def num_available(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Slots nobody owns, quarantined ones included."""
        return len(self._free) + len(self._quarantine)

    def count(self, phase: SlotPhase) -> int:
        """Number of slots in ``phase``. O(total): for statistics and checks."""
        return int(np.count_nonzero(self.phase[1:] == phase))

    def begin_step(self) -> None:
        """A new step is being built: slots released before this point may be handed out."""
        self._free.extend(self._quarantine)
        self._quarantine.clear()

    def take_working(self) -> int:
        """free -> working. The caller has checked ``num_available``."""
        return self._take(SlotPhase.WORKING, -1, -1)

    def take_pending(self, depth: int, step: int) -> int:
        """free -> pending: step ``step`` will write the state at exactly ``depth``."""
        return self._take(SlotPhase.PENDING, depth, step)

    def publish(self, slot: int, committed_step: int) -> None:
        """pending -> checkpoint, once its writing step has been committed."""
        self._expect(slot, SlotPhase.PENDING)
        assert self.step[slot] <= committed_step, "a state is published before it is written"
        self.phase[slot] = SlotPhase.CHECKPOINT

    def donate(self, slot: int, depth: int) -> None:
        """working -> checkpoint at ``depth``; its request is quiet."""
        self._expect(slot, SlotPhase.WORKING)
        self.phase[slot] = SlotPhase.CHECKPOINT
        self.depth[slot] = depth

    def adopt(self, slot: int) -> None:
        """checkpoint -> working: the tree's only copy is moved to the resuming request."""
        self._expect(slot, SlotPhase.CHECKPOINT)
        self.phase[slot] = SlotPhase.WORKING
        self.depth[slot] = -1

    def release(self, slot: int) -> None:
        """working or pending -> free, handed out from the next step on."""
        assert self.phase[slot] in (SlotPhase.WORKING, SlotPhase.PENDING), (
            slot,
            SlotPhase(self.phase[slot]),
        )
        self._clear(slot)
        self._quarantine.append(slot)

    def reclaim(self, slot: int) -> None:
        """pending -> free, usable at once: a committed track that no step in flight writes."""
        self._expect(slot, SlotPhase.PENDING)
        self._clear(slot)
        self._free.append(slot)

    def evict(self, slot: int) -> None:
        """checkpoint -> free, usable at once."""
        self._expect(slot, SlotPhase.CHECKPOINT)
        self._clear(slot)
        self._free.append(slot)

    def _take(self, phase: SlotPhase, depth: int, step: int) -> int:
        slot = self._free.pop()
        self._expect(slot, SlotPhase.FREE)
        self.phase[slot] = phase
        self.depth[slot] = depth
        self.step[slot] = step
        return slot

    def _clear(self, slot: int) -> None:
        self.phase[slot] = SlotPhase.FREE
        self.depth[slot] = -1
        self.step[slot] = -1

    def _expect(self, slot: int, phase: SlotPhase) -> None:
        actual = SlotPhase(self.phase[slot])
        assert slot > 0, "the sink has no life"
        assert actual == phase, f"state slot {slot} is {actual.name}, not {phase.name}"

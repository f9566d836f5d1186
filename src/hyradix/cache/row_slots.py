"""The KV slots behind a request's row: promised, taken, given back early, reordered.

Owns: the row's own part of the request table (columns [protected_len, num_slots)), the promises,
and evicting KV where slots are short. Does not know: matches, states' worth, batches.

Invariants: promised slots never exceed what is free or evictable; a row's own columns name distinct
slots; slots past what its tokens need (scratch of draft nodes) are the row's like all others and go
back with them, or earlier (``trim``) when somebody needs them for tokens.

    row   |--- tree's ---|--- own: tokens ---|--- own: run ahead, draft nodes ---|  free columns
          0         protected_len     next position                        num_slots     width
Read next: ``holding.py``, ``prefix_cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyradix.cache.holding import CacheCounters, Holding
from hyradix.cache.kv_slots import KVSlots
from hyradix.cache.request_table import RequestTable
from hyradix.cache.state_slots import StateSlots
from hyradix.cache.tree import RadixTree
from hyradix.request import Int32Array, RowUpdate


@dataclass(slots=True)
class RowSlots:
    """See the module's docstring."""

    kv: KVSlots
    states: StateSlots
    tree: RadixTree
    table: RequestTable
    counters: CacheCounters
    num_reserved: int = 0
    """Slots promised to running requests and not yet taken."""

    @property
    def num_obtainable(self) -> int:
        """Slots that are free or evictable now."""
        return self.kv.num_available + self.tree.num_evictable_tokens

    @property
    def num_unpromised(self) -> int:
        """Slots that could be had now without breaking a promise."""
        return self.num_obtainable - self.num_reserved

    def num_missing(self, holding: Holding, num_positions: int) -> int:
        """Slots, besides its own and those promised to it, that reaching so far would take."""
        return max(num_positions - holding.num_slots - holding.reserved, 0)

    def can_extend(self, holding: Holding, num_positions: int, *, besides: int = 0) -> bool:
        """Whether ``extend`` to ``num_positions`` would find the slots, promised or not.

        ``besides``: unpromised slots that must be left for others.
        """
        missing = self.num_missing(holding, num_positions)
        return missing == 0 or missing + besides <= self.num_unpromised

    def extend(self, holding: Holding, num_positions: int) -> RowUpdate | None:
        """Make the row's slots reach position ``num_positions``; the new ones, if any.

        Promised slots are used first; past them the caller has asked ``can_extend``.
        """
        count = num_positions - holding.num_slots
        if count <= 0:
            return None
        self._make_room(count)
        slots = self.kv.allocate(count)
        start = holding.num_slots
        self.table.kv_slots[holding.row, start:num_positions] = slots
        holding.num_slots = num_positions
        used = min(count, holding.reserved)
        holding.reserved -= used
        self.num_reserved -= used
        return RowUpdate(holding.row, start, slots)

    def trim(self, holding: Holding, num_positions: int) -> None:
        """Give back the slots past ``num_positions``, for use at once.

        No step in flight or being built names the row.
        """
        assert num_positions >= holding.protected_len
        self.kv.reclaim(self.table.kv_slots[holding.row, num_positions : holding.num_slots].copy())
        holding.num_slots = min(holding.num_slots, num_positions)

    def reorder(self, holding: Holding, start: int, order: Int32Array) -> None:
        """Columns start.. are the old ones at start + ``order`` (a permutation)."""
        end = start + len(order)
        assert holding.protected_len <= start
        assert end <= holding.num_slots
        row = self.table.kv_slots[holding.row]
        row[start:end] = row[start + order]

    def own(self, holding: Holding) -> Int32Array:
        """The slots that are the row's alone (a copy)."""
        return self.table.kv_slots[holding.row, holding.protected_len : holding.num_slots].copy()

    def _make_room(self, count: int) -> None:
        short = count - self.kv.num_available
        if short > 0:
            slots, states = self.tree.evict_kv(short)
            self.kv.reclaim(slots)
            self.counters.evicted_kv += len(slots)
            for slot in states:
                self.states.evict(slot)
            self.counters.evicted_states += len(states)
        assert self.kv.num_available >= count, "promised KV slots are not there"

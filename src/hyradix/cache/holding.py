"""What one running request holds of the pools, and what the cache counts.

Owns: the shapes of ``Holding`` and ``CacheCounters``; every field is written by ``PrefixCache`` and
its ``RowSlots`` alone.
Invariants:
- row positions [0, protected_len) are the tree's slots, under ``receipt``'s KV lock;
- row positions [protected_len, num_slots) are the request's own;
- ``pending`` states are written by steps in flight or by the one being built.

    row   |--- tree's: shared, locked ---|--- own, freed at the end or given to the tree ---|
          0                        protected_len                                       num_slots
Read next: ``prefix_cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from hyradix.cache.node import Receipt, StateRef
from hyradix.cache.placement import Candidate, CheckpointKind
from hyradix.request import MissReason, Namespace


@dataclass(slots=True)
class CacheCounters:
    """Monotonic counts since start."""

    evicted_states: int = 0
    evicted_kv: int = 0
    skipped_saves: int = 0
    moved_states: int = 0


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A state that step ``step`` writes at exactly ``depth`` into ``slot``."""

    slot: int
    depth: int
    step: int
    kind: CheckpointKind


@dataclass(slots=True)
class Holding:
    """See the module's docstring."""

    row: int
    namespace: Namespace
    working_slot: int
    receipt: Receipt | None
    num_kv_tokens: int
    num_cached_tokens: int
    miss_reason: MissReason
    protected_len: int
    num_slots: int
    reserved: int
    """KV slots promised to this request and not yet allocated."""
    candidates: list[Candidate]
    hasher: xxhash.xxh3_64
    """Digest of tokens[:hashed_len]; moves forward with published depths."""
    hashed_len: int = 0
    pending: list[PendingSave] = field(default_factory=list)
    tracks: list[PendingSave] = field(default_factory=list)
    """Committed periodic saves of a decoding request, newest last (at most one is kept)."""
    skipped: list[int] = field(default_factory=list)
    """Depths where no slot could be had, to be remembered once their tokens are known."""
    chunk_end: StateRef | None = None
    """The published end of the latest chunk of an unfinished prefill."""

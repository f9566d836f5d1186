"""The cache as the scheduler sees it: pools, tree and request table moved together.

Owns: every transition of states, and of KV between rows and tree: one file, so that whoever looks
for the line that moved a slot finds it here (the reason for its length). Rows take KV through
``row_slots.py``. Does not know: the queue, batches, sampling. What the data plane has to do about a
decision is returned (``StateOp``, ``RowUpdate``, ``StateSave``), never done here.

Invariants (``invariants.check`` proves them): for each pool free + owned by rows + owned by the
tree = total; optional checkpoints never fail a request: where no slot can be had the save is
skipped and counted.
Source: DESIGN sections 2 to 5. Read next: ``row_slots.py``, ``tree.py``, ``state_slots.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hyradix.cache.holding import CacheCounters, Holding, PendingSave
from hyradix.cache.kv_slots import KVSlots
from hyradix.cache.node import TOKEN_BYTES, Match, Receipt, StateRef, new_hasher
from hyradix.cache.pins import Pins
from hyradix.cache.placement import Candidate, CheckpointKind, plan_candidates
from hyradix.cache.policy import make_policy
from hyradix.cache.request_table import RequestTable
from hyradix.cache.row_slots import RowSlots
from hyradix.cache.state_slots import StateSlots
from hyradix.cache.tree import RadixTree
from hyradix.config import EngineConfig
from hyradix.request import (
    Boundary,
    Int32Array,
    MissReason,
    Namespace,
    RowUpdate,
    StateOp,
    StateOpKind,
    StateSave,
)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request has entered: what the data plane must do before its first forward."""

    holding: Holding
    state_op: StateOp | None
    kv_update: RowUpdate | None
    """The shared KV slots of the matched prefix."""


@dataclass(slots=True)
class PrefixCache:
    """See the module's docstring. One instance, one thread."""

    config: EngineConfig
    kv: KVSlots = field(init=False)
    states: StateSlots = field(init=False)
    tree: RadixTree = field(init=False)
    table: RequestTable = field(init=False)
    rows: RowSlots = field(init=False)
    pins: Pins = field(init=False)
    counters: CacheCounters = field(init=False, default_factory=CacheCounters)
    holdings: dict[int, Holding] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = KVSlots(self.config.num_kv_slots)
        self.states = StateSlots(self.config.num_states)
        self.tree = self.make_tree()
        self.table = RequestTable(self.config.max_requests, self.config.table_width)
        self.rows = RowSlots(self.kv, self.states, self.tree, self.table, self.counters)
        self.pins = Pins(self.config, self.tree)

    def make_tree(self) -> RadixTree:
        """The tree, under the policy that the config names."""
        return RadixTree(make_policy(self.config.policy))

    def begin_step(self) -> None:
        """A new step is being built: slots given back before this point may be handed out."""
        self.kv.begin_step()
        self.states.begin_step()

    @property
    def is_anything_quarantined(self) -> bool:
        """Whether slots given back since then wait for the next step to be built."""
        kv, states = self.kv, self.states
        return kv.num_free > kv.num_available or states.num_free > states.num_available

    # ---- admit ----------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: bytes, *, limit: int) -> Match:
        """What of ``tokens[:limit]`` is known. Changes nothing; nothing is known when off."""
        if not self.config.prefix_cache:
            return Match(namespace, self.tree.version)
        return self.tree.match_prefix(namespace, tokens, limit=limit)

    def admit(
        self,
        match: Match,
        *,
        num_prompt_tokens: int,
        num_positions: int,
        boundaries: tuple[Boundary, ...],
    ) -> Admission | None:
        """Lock ``match``, then take a row, a working state and a promise of KV; None: no room.

        ``num_positions``: row positions promised to the request; those past the match are
        allocated by ``rows.extend``. Nothing is held when None is returned.
        """
        if self.table.num_free == 0:
            return None
        receipt = self.tree.lock(match) if self.config.prefix_cache else None
        needed = num_positions - match.num_kv_tokens
        is_room = needed <= self.rows.num_unpromised
        slot = self._working_slot(receipt) if is_room else None
        if slot is None:
            if receipt is not None:
                self.tree.unlock_kv(receipt)
            return None
        if receipt is not None:
            self.tree.touch(receipt)
        holding = Holding(
            row=self.table.take(),
            namespace=match.namespace,
            working_slot=slot,
            receipt=receipt,
            num_kv_tokens=match.num_kv_tokens,
            num_cached_tokens=match.num_cached_tokens,
            miss_reason=match.reason,
            protected_len=match.num_kv_tokens,
            num_slots=match.num_kv_tokens,
            reserved=needed,
            candidates=self._candidates(match, num_prompt_tokens, boundaries),
            hasher=new_hasher(match.namespace),
        )
        self.rows.num_reserved += needed
        self.holdings[holding.row] = holding
        self.table.kv_slots[holding.row, : match.num_kv_tokens] = match.kv_slots
        update = RowUpdate(holding.row, 0, match.kv_slots) if match.num_kv_tokens else None
        return Admission(holding, self._first_op(match, receipt, slot), update)

    def _candidates(
        self, match: Match, num_prompt_tokens: int, boundaries: tuple[Boundary, ...]
    ) -> list[Candidate]:
        if not self.config.prefix_cache:
            return []
        return plan_candidates(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=match.num_cached_tokens,
            num_kv_tokens=match.num_kv_tokens,
            boundaries=boundaries,
            min_gain=self.config.min_gain,
            max_checkpoints=self.config.max_checkpoints,
        )

    def _working_slot(self, receipt: Receipt | None) -> int | None:
        """A slot for the working state: a free one, an evicted one, somebody's track, or, where
        there is none, the tree's own is moved."""
        if self._make_state_room() or self._reclaim_track():
            return self.states.take_working()
        slot = self.tree.move_state(receipt) if receipt is not None else None
        if slot is not None:
            self.states.adopt(slot)
            self.counters.moved_states += 1
        return slot

    def _first_op(self, match: Match, receipt: Receipt | None, slot: int) -> StateOp | None:
        """How the working state gets its value: cleared, copied, or (moved) it has it already."""
        if match.state_node is None:
            return StateOp(StateOpKind.CLEAR, slot)
        if receipt is None or receipt.state_node is None:
            return None
        state = match.state_node.state
        assert state is not None
        assert state.depth == match.num_cached_tokens
        return StateOp(StateOpKind.COPY, slot, state.slot)

    def seal(self, holding: Holding) -> None:
        """The batch with the request's first copy is complete: give the state lock back."""
        if holding.receipt is not None:
            self.tree.unlock_state(holding.receipt)

    # ---- room -----------------------------------------------------------------------------------

    def _make_state_room(self) -> bool:
        """Have at least one state slot available, evicting if need be."""
        if self.states.num_available == 0:
            slot = self.tree.evict_state()
            if slot is None:
                return False
            self.states.evict(slot)
            self.counters.evicted_states += 1
        return True

    def _reclaim_track(self) -> bool:
        """Tracks are optional: the oldest request's makes room for somebody's working state."""
        for holding in self.holdings.values():
            if holding.tracks:
                self.states.reclaim(holding.tracks.pop(0).slot)
                return True
        return False

    # ---- checkpoints ----------------------------------------------------------------------------

    def plan_saves(
        self, holding: Holding, start: int, end: int, step: int, *, is_last_chunk: bool
    ) -> list[StateSave]:
        """Slots for the states that the forward over [start, end) shall leave behind."""
        if not self.config.prefix_cache:
            return []
        saves: list[StateSave] = []
        while holding.candidates and holding.candidates[0].position <= end:
            candidate = holding.candidates.pop(0)
            if candidate.position > start:
                self._plan(
                    holding, candidate.position, candidate.kind, candidate.is_urgent, step, saves
                )
        if not is_last_chunk and all(save.depth != end for save in saves):
            self._plan(holding, end, CheckpointKind.CHUNK_END, False, step, saves)
        return saves

    def plan_track(self, holding: Holding, depth: int, step: int) -> list[StateSave]:
        """A slot for the periodic save of a decoding request at ``depth``."""
        if not self.config.prefix_cache:
            return []
        saves: list[StateSave] = []
        self._plan(holding, depth, CheckpointKind.TRACK, False, step, saves)
        return saves

    def _plan(
        self,
        holding: Holding,
        depth: int,
        kind: CheckpointKind,
        urgent: bool,
        step: int,
        saves: list[StateSave],
    ) -> None:
        if self.states.num_available == 0 and not (urgent and self._make_state_room()):
            self.counters.skipped_saves += 1
            if kind is not CheckpointKind.TRACK:
                holding.skipped.append(depth)
            return
        slot = self.states.take_pending(depth, step)
        holding.pending.append(PendingSave(slot, depth, step, kind))
        saves.append(StateSave(holding.row, slot, depth))

    def promise(self, holding: Holding, depth: int, num_scheduled: int) -> int:
        """The deepest state at or under ``depth`` that a prefilling request is about to leave.

        If ``depth`` is still ahead of it, a checkpoint there is asked for (somebody waits).
        """
        if depth > num_scheduled:
            if all(c.position != depth for c in holding.candidates):
                if len(holding.candidates) >= max(self.config.max_checkpoints, 2):
                    ahead = [c.position for c in holding.candidates if c.position <= depth]
                    return max(ahead, default=0)
                candidate = Candidate(depth, CheckpointKind.BRANCH, True)
                holding.candidates.append(candidate)
                holding.candidates.sort(key=lambda c: c.position)
            return depth
        return max((p.depth for p in holding.pending if p.depth <= depth), default=0)

    # ---- learn ----------------------------------------------------------------------------------

    def learn(
        self, holding: Holding, tokens: bytes, num_computed: int, step: int, *, num_consumed: int
    ) -> list[RowUpdate]:
        """Step ``step`` is committed and ``tokens[:num_computed]`` of a prompt are computed.

        Publishes the states whose write has been committed and gives the prompt's KV to the tree;
        returns the tree's slots that the row must use from now on. ``num_consumed``: positions
        that the row has consumed in all, also such as are not kept in ``tokens``.
        """
        usable = min(num_consumed, len(tokens) // TOKEN_BYTES)
        ready = [save for save in holding.pending if save.step <= step]
        holding.pending = [save for save in holding.pending if save.step > step]
        updates: list[RowUpdate] = []
        for save in ready:
            if save.kind is CheckpointKind.TRACK:
                self._keep_track(holding, save, usable)
            else:
                self._publish(holding, tokens, save, step, updates)
        if num_computed > holding.protected_len and holding.receipt is not None:
            self._insert(holding, tokens, num_computed, None, updates)
        self._note_skipped(holding, tokens, num_computed)
        return updates

    def _publish(
        self,
        holding: Holding,
        tokens: bytes,
        save: PendingSave,
        step: int,
        updates: list[RowUpdate],
    ) -> None:
        self.states.publish(save.slot, step)
        digest = self._digest(holding, tokens, save.depth)
        ref = StateRef(save.slot, save.depth, digest, save.step)
        kept = self._insert(holding, tokens, save.depth, ref, updates)
        self._drop_chunk_end(holding)
        if kept and save.kind is CheckpointKind.CHUNK_END:
            holding.chunk_end = ref

    def _drop_chunk_end(self, holding: Holding) -> None:
        """The end of the previous chunk has done its duty unless somebody resumed from it."""
        ref, holding.chunk_end = holding.chunk_end, None
        if ref is None or holding.receipt is None:
            return
        node = holding.receipt.kv_node
        while node is not None and node.depth > ref.depth:
            node = node.parent
        if node is not None and node.state == ref and node.state_lock == 0 and node.uses == 0:
            self.states.evict(self.tree.take_state(node, None))

    def _insert(
        self,
        holding: Holding,
        tokens: bytes,
        depth: int,
        state: StateRef | None,
        updates: list[RowUpdate],
    ) -> bool:
        """Give tokens[:depth] to the tree and move the receipt there; frees duplicates."""
        receipt = holding.receipt
        assert receipt is not None
        assert receipt.kv_node is not None
        start = receipt.kv_node if receipt.kv_node.depth <= depth else None
        result = self.tree.insert(
            holding.namespace,
            tokens,
            self.table.kv_slots[holding.row, :depth],
            state,
            protected_len=holding.protected_len,
            start=start,
        )
        if start is not None:
            self.tree.advance(receipt, result.node)
        holding.protected_len = max(holding.protected_len, depth)
        for at, slots in result.replaced:
            self.table.kv_slots[holding.row, at : at + len(slots)] = slots
            updates.append(RowUpdate(holding.row, at, slots))
        self.kv.free(result.duplicates)
        if state is not None and not result.is_state_kept:
            self.states.evict(state.slot)
        return result.is_state_kept

    def _keep_track(self, holding: Holding, save: PendingSave, usable: int) -> None:
        """The newest track takes the older one's place; one past ``usable`` is of no use.

        Drafts that were planned for and not accepted leave their track unwritten.
        """
        if save.depth > usable:
            self.states.release(save.slot)
            return
        for older in holding.tracks:
            self.states.release(older.slot)
        holding.tracks = [save]

    def _digest(self, holding: Holding, tokens: bytes, depth: int) -> int:
        """Hash of tokens[:depth]; streams forward, starts anew only to go back."""
        if depth < holding.hashed_len:
            holding.hasher, holding.hashed_len = new_hasher(holding.namespace), 0
        holding.hasher.update(tokens[holding.hashed_len * TOKEN_BYTES : depth * TOKEN_BYTES])
        holding.hashed_len = depth
        return int(holding.hasher.intdigest())

    def _note_skipped(self, holding: Holding, tokens: bytes, num_computed: int) -> None:
        for depth in [d for d in holding.skipped if d <= num_computed]:
            holding.skipped.remove(depth)
            digest = self._digest(holding, tokens, depth)
            self.tree.fates.note(holding.namespace, depth, digest, MissReason.NO_SLOT)

    # ---- end ------------------------------------------------------------------------------------

    def finish(
        self,
        holding: Holding,
        tokens: bytes,
        *,
        state_depth: int,
        kept: int,
        is_working_donated: bool = True,
        is_pinned: bool = False,
    ) -> None:
        """The request is over (or preempted) and quiet: donate its state, give the rest back.

        ``state_depth``: tokens its working state has consumed; ``kept``: how many of them (at
        most) may be published. A state that has passed what is kept is of no use, nor is one
        that may not be donated; then the last track serves, if it is not deeper.
        """
        if holding.receipt is not None and state_depth > 0:
            usable = is_working_donated and state_depth <= kept
            depth = self._donate(holding, tokens, state_depth if usable else None, kept)
            if is_pinned and depth:
                self.pins.pin(holding.namespace, tokens, depth)
        self.release(holding)

    def _donate(self, holding: Holding, tokens: bytes, state_depth: int | None, kept: int) -> int:
        """Publish the working state (at ``state_depth``) or a track; the depth, 0 for neither."""
        if state_depth is not None:
            depth, slot = state_depth, holding.working_slot
        else:
            if not holding.tracks:
                return 0
            track = holding.tracks[-1]
            assert track.depth <= kept, "``learn`` keeps no track past what is kept"
            depth, slot = track.depth, track.slot
        if slot == holding.working_slot:
            self.states.donate(slot, depth)
            holding.working_slot = 0
        else:
            self.states.publish(slot, int(self.states.step[slot]))
            holding.tracks = [t for t in holding.tracks if t.slot != slot]
        ref = StateRef(slot, depth, self._digest(holding, tokens, depth), -1)
        self._insert(holding, tokens, depth, ref, [])
        return depth

    def release(self, holding: Holding) -> None:
        """Give back what the request still owns; publishes nothing."""
        self.kv.free(self.rows.own(holding))
        if holding.working_slot:
            self.states.release(holding.working_slot)
        for save in [*holding.pending, *holding.tracks]:
            self.states.release(save.slot)
        if holding.receipt is not None:
            self.tree.unlock_kv(holding.receipt)
        self.rows.num_reserved -= holding.reserved
        self.table.release(holding.row)
        del self.holdings[holding.row]

    # ---- whole ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forget every unlocked prefix."""
        slots, states = self.tree.evict_kv(self.tree.num_tokens)
        self.kv.reclaim(slots)
        for slot in states:
            self.states.evict(slot)

    def protected_row(self, holding: Holding) -> Int32Array:
        """The row's slots so far (a view)."""
        return self.table.kv_slots[holding.row, : holding.num_slots]


def to_bytes(tokens: Int32Array) -> bytes:
    """Token ids as the little-endian int32 buffer that keys are made of."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()

"""Puts the rows of running requests into a step, with the KV slots and saves that they need.

Owns: how far a row's slots reach, and how many draft nodes it is given. Never preempts: a decode
that lacks a slot for its token comes back to the scheduler.
Does not know: the queue, which requests go first, what a step meant.

Invariants:
- drafts take only what is left when every decode of the step has the slot for its token, and the
  slots of their nodes are given back first when there is too little;
- the position of a row with drafts in flight is unknown, so it is in no other step;
- a step never needs the data plane to move a state past what the host knows to be kept.
Source: DESIGN sections 5 and 6. Read next: ``drafting.py``, ``cache/row_slots.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hyradix.cache.holding import Holding
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.scheduler.batch_builder import BatchBuilder, PlannedRow
from hyradix.scheduler.drafting import Drafting
from hyradix.scheduler.request_state import RequestState

DECODE_SLOTS = 16
"""KV slots a decoding request takes at a time: short runs keep its slots contiguous."""

NO_DRAFTS = (1, 1)


class RowPlanner:
    """See the module's docstring."""

    def __init__(self, config: EngineConfig, cache: PrefixCache, drafting: Drafting) -> None:
        self._config = config
        self._cache = cache
        self._drafting = drafting
        self._defers_state = config.defers_state
        self._has_draft_layer = config.spec is not None and config.spec.proposer == "mtp"
        self._num_missing = 0
        self._is_drafting = False
        """Whether any row of the step that is being built may have drafts."""

    # ---- decode ---------------------------------------------------------------------------------

    def begin_step(self, decodes: Sequence[RequestState], *, is_waited_for: bool) -> None:
        """These requests would decode now: drafts must leave each the slot for its token."""
        self._is_drafting = self._drafting.begin_step(decodes, is_waited_for=is_waited_for)
        if self._config.spec is None:
            return
        self._num_missing = len(decodes)
        if not self._is_drafting and self._cache.rows.num_unpromised >= 2 * len(decodes):
            return  # nothing is short, and each row lacks one slot at most
        self._num_missing = self._missing(decodes)
        if self._num_missing > self._cache.rows.num_unpromised:
            for state in decodes:
                if state.num_in_flight == 0:
                    self._cache.rows.trim(_held(state), state.num_scheduled_tokens + 1)
            self._num_missing = self._missing(decodes)

    def depth_of(self, batch: BatchBuilder) -> int:
        """Drafts that a row of the step may have, one after the other; -1: it is not of decodes
        alone, or nothing is ever drafted."""
        if self._config.spec is None or batch.num_prefill_tokens or not batch.planned:
            return -1
        if not self._is_drafting:
            return 0
        return max(planned.max_accepted for planned in batch.planned) - 1

    def _missing(self, decodes: Iterable[RequestState]) -> int:
        """Unpromised slots that these take for the tokens they decode now."""
        rows = self._cache.rows
        return sum(rows.num_missing(_held(s), s.num_scheduled_tokens + 1) for s in decodes)

    def plan_decode(self, batch: BatchBuilder, state: RequestState) -> bool:
        """The next round or token of a request; False: there is no KV slot for it.

        True also where it has to wait for a step in flight first.
        """
        if self._must_wait(state):
            return True
        nodes, accepted = self._limits(state) if self._is_drafting else NO_DRAFTS
        if nodes > 1:
            if state.num_in_flight == 0:
                self._plan_drafts(batch, state, nodes, accepted)
            return True
        holding, end = _held(state), state.num_scheduled_tokens + 1
        num_slots = min(end + DECODE_SLOTS - 1, state.max_total_tokens)
        if end <= holding.num_slots:
            num_slots = end
        elif not self._cache.rows.can_extend(holding, num_slots):
            return False
        self.plan(batch, state, 1, num_slots=num_slots)
        return True

    def _must_wait(self, state: RequestState) -> bool:
        """Whether the data plane could not hold back one more token of this row.

        With a log, what is not committed stays in it. With replay, what the row's last step held
        back goes into its working state now: it must be tokens that are kept for certain.
        """
        start = state.num_scheduled_tokens
        if self._config.num_log_rows:
            logged = start - max(state.num_computed_tokens, state.prefill_end)
            return logged >= self._config.num_log_rows
        return self._defers_state and start > len(state.tokens)

    def _limits(self, state: RequestState) -> tuple[int, int]:
        """Nodes and positions that the next round of ``state`` may have; ``NO_DRAFTS``."""
        spec = self._config.spec
        assert spec is not None
        nodes, accepted = self._drafting.limit(state)
        if nodes <= 1:
            return NO_DRAFTS
        start = state.num_scheduled_tokens
        accepted = min(accepted, state.max_total_tokens - start - 1)
        if spec.shape.is_chain:
            nodes = min(nodes, accepted)
        if nodes <= 1 or accepted <= 1:
            return NO_DRAFTS
        is_room = self._cache.rows.can_extend(
            _held(state), start + spec.num_slots, besides=self._num_missing
        )
        return (nodes, accepted) if is_room else NO_DRAFTS

    def _plan_drafts(
        self, batch: BatchBuilder, state: RequestState, nodes: int, accepted: int
    ) -> None:
        spec = self._config.spec
        assert spec is not None
        holding = _held(state)
        num_slots = state.num_scheduled_tokens + spec.num_slots
        if num_slots > holding.num_slots:
            run = max(min(num_slots + DECODE_SLOTS - 1, state.max_total_tokens), num_slots)
            if self._cache.rows.can_extend(holding, run, besides=self._num_missing):
                num_slots = run
        self.plan(batch, state, 1, num_slots=num_slots, max_nodes=nodes, max_accepted=accepted)

    # ---- any row --------------------------------------------------------------------------------

    def plan(
        self,
        batch: BatchBuilder,
        state: RequestState,
        count: int,
        *,
        num_slots: int = 0,
        max_nodes: int = 1,
        max_accepted: int = 1,
    ) -> None:
        """Put ``count`` positions of a request into the step; its slots reach ``num_slots``."""
        holding = _held(state)
        start = state.num_scheduled_tokens
        end = start + count
        is_prefill = start < state.prefill_end
        planned = PlannedRow(
            state=state,
            row=holding.row,
            start=start,
            num_tokens=count,
            samples=start + count >= state.num_known_tokens,
            is_prefill=is_prefill,
            max_nodes=0 if is_prefill else max_nodes,
            max_accepted=max_accepted,
        )
        is_fed = self._has_draft_layer and state.is_followed
        if is_fed or max(end, num_slots) > holding.num_slots:
            self._extend(batch, holding, planned, num_slots)
        interval, furthest = self._config.track_interval, start + max(count, max_accepted)
        if is_prefill or (interval and furthest // interval > start // interval):
            self._plan_saves(batch, holding, planned)
        write_from = max(start, holding.num_kv_tokens)
        batch.add_row(planned, write_from=write_from, state_slot=holding.working_slot)
        has_drafts = max_nodes > 1 and not is_prefill
        state.enter_step(end, samples=planned.samples, has_drafts=has_drafts)

    def _extend(
        self, batch: BatchBuilder, holding: Holding, planned: PlannedRow, num_slots: int
    ) -> None:
        num_slots = max(planned.end, num_slots)
        if self._is_next_slot_wanted(planned) and num_slots == planned.end:
            num_slots += self._cache.rows.can_extend(
                holding, num_slots + 1, besides=self._num_missing
            )
        update = self._cache.rows.extend(holding, num_slots)
        if update is not None:
            batch.kv_updates.append(update)

    def _is_next_slot_wanted(self, planned: PlannedRow) -> bool:
        """The draft layer of ``mtp`` computes KV for the token that is just being sampled."""
        spec = self._config.spec
        is_next = planned.samples and planned.end < planned.state.max_total_tokens
        is_followed = planned.state.is_followed
        return spec is not None and spec.proposer == "mtp" and is_followed and is_next

    def _plan_saves(self, batch: BatchBuilder, holding: Holding, planned: PlannedRow) -> None:
        cache, step = self._cache, batch.step
        if planned.is_prefill:
            batch.saves += cache.plan_saves(
                holding,
                planned.start,
                planned.end,
                step,
                is_last_chunk=planned.end >= planned.state.prefill_end,
            )
        else:
            interval = self._config.track_interval
            first = (planned.start // interval + 1) * interval
            for depth in range(first, planned.furthest + 1, interval):
                batch.saves += cache.plan_track(holding, depth, step)


def _held(state: RequestState) -> Holding:
    assert state.holding is not None
    return state.holding

"""How a request leaves its row: ended or preempted, quiet, folded, and what it leaves behind.

Owns: the second half of every request's life, and who is preempted. Does not know: steps in
flight (it is told when one is committed), tokens, the queue's order.

Invariants:
- slots come back only when no step in flight names the row;
- a working state that may lag behind (``EngineConfig.defers_state``) is donated only after a
  ``StateFold`` has brought it to exactly the depth that is kept; a step may consist of folds;
- a state past what is kept, or of a faulty row, is never donated.
Source: DESIGN section 5, finish and preempt. Read next: ``request_state.py``.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.request import FinishReason, StateFold
from hyradix.scheduler.batch_builder import BatchBuilder
from hyradix.scheduler.progress import SchedulerCounters
from hyradix.scheduler.request_state import RequestState, Status


@dataclass(slots=True)
class Requests:
    """Every request that has not finished."""

    waiting: list[RequestState] = field(default_factory=list)
    running: list[RequestState] = field(default_factory=list)
    """Those that hold a row, by arrival."""
    by_id: dict[str, RequestState] = field(default_factory=dict)


class Departures:
    """See the module's docstring."""

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        requests: Requests,
        counters: SchedulerCounters,
    ) -> None:
        self.finish_reasons: Counter[str] = Counter()
        self._config = config
        self._cache = cache
        self._requests = requests
        self._counters = counters
        self._to_fold: list[RequestState] = []
        self._forced_at = 0

    def end(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """No more is scheduled; ``come_to_rest`` follows."""
        state.end(reason, stop_reason)
        self.finish_reasons[reason.value] += 1
        if state.status is Status.FINISHED:
            del self._requests.by_id[state.request_id]

    # ---- preempt --------------------------------------------------------------------------------

    def victim(self, batch: BatchBuilder) -> RequestState | None:
        """The youngest request that may be preempted now; None: wait for one that drains.

        Nor is anybody preempted while slots of draft nodes are about to come free.
        """
        if any(s.is_draining or s.has_drafts_in_flight for s in self._requests.running):
            return None
        taken = {id(planned.state) for planned in batch.planned}
        candidates = [s for s in self._requests.running if id(s) not in taken]
        return candidates[-1] if candidates else None

    def preempt(self, state: RequestState) -> None:
        """Back to the queue, once it is quiet."""
        self._counters.preemptions += 1
        state.preempt()
        self.come_to_rest(state)

    def force_preemption(self, step: int) -> None:
        """For tests: every N steps the youngest goes back to the queue.

        It must have got further than the last time it was preempted, or it might never end:
        what it left behind may be evicted before it is back.
        """
        every = self._config.force_preempt_every
        if every and step and step % every == 0 and self._forced_at != step:
            self._forced_at = step
            running = [
                s
                for s in self._requests.running
                if s.status is Status.RUNNING and s.num_computed_tokens > s.preempted_at
            ]
            if running:
                self.preempt(running[-1])

    # ---- rest -----------------------------------------------------------------------------------

    def come_to_rest(self, state: RequestState) -> None:
        """If no step names the row any more: donate what is worth keeping, give back the rest."""
        if not state.is_draining or state.num_in_flight:
            return
        is_over = state.status is Status.FINISHING
        is_donated = is_over or self._config.preempt_donate == "always"
        if is_donated and self._needs_fold(state):
            if state not in self._to_fold:
                self._to_fold.append(state)
            return
        depth = state.state_depth
        holding = state.settle() if is_over else state.requeue()
        self._requests.running.remove(state)
        if is_over:
            del self._requests.by_id[state.request_id]
        else:
            insort(self._requests.waiting, state, key=lambda s: s.arrival)
        if state.is_faulty:
            self._cache.release(holding)
            return
        self._cache.finish(
            holding,
            state.tokens.to_bytes(),
            state_depth=depth,
            kept=len(state.tokens),
            is_working_donated=is_donated,
            is_pinned=is_over and state.request.pin,
        )

    def _needs_fold(self, state: RequestState) -> bool:
        """Whether its working state may lag behind, and the cache could use it."""
        return (
            self._config.defers_state
            and self._config.prefix_cache
            and not state.is_faulty
            and state.folded_at is None
            and state.num_computed_tokens > state.prefill_end
        )

    def add_folds(self, batch: BatchBuilder) -> None:
        """Have this step fold what came to rest."""
        for state in self._to_fold:
            assert state.holding is not None
            depth = state.begin_fold()
            fold = StateFold(state.holding.row, state.holding.working_slot, depth)
            batch.folded.append(state)
            batch.folds.append(fold)
        self._to_fold.clear()

    def commit_fold(self, state: RequestState) -> None:
        """The step that folds it is committed."""
        state.leave_fold()
        self.come_to_rest(state)

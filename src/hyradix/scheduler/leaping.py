"""The scheduler in virtual time: many decode steps at once, where nothing else could happen.

Owns: when a leap is exact. A leap of k steps is planned as one batch whose decode rows compute k
positions and sample k tokens; slots, evictions and donations come out as k single steps would
leave them. It is taken only when the last step was decode alone, nothing has arrived, ended or
been preempted since, no running request ends before the leap does, and the KV slots for all of it
are free; otherwise the step is a single one.
Does not know: where the tokens come from (a data plane that knows the replies).
Read next: ``scheduler.py``; who uses it: ``engine/bench_cache.py``.
"""

from __future__ import annotations

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.request import Request, ScheduledBatch, StepOutput
from hyradix.scheduler.batch_builder import BatchBuilder
from hyradix.scheduler.progress import Progress, TokenSink
from hyradix.scheduler.request_state import RequestState
from hyradix.scheduler.rows import DECODE_SLOTS
from hyradix.scheduler.scheduler import Scheduler


class LeapingScheduler(Scheduler):
    """See the module's docstring. One step in flight, no tracks, no drafts."""

    def __init__(self, config: EngineConfig, sink: TokenSink, cache: PrefixCache) -> None:
        assert config.track_interval == 0, "a leap would pass over tracks"
        super().__init__(config, sink, cache=cache)
        self.now = 0
        """Steps of virtual time so far."""
        self._leap = 1
        self._is_calm = False
        self._seen_preemptions = 0

    def add(self, request: Request) -> RequestState:
        """See ``Scheduler``."""
        self._is_calm = False
        return super().add(request)

    def schedule(self) -> ScheduledBatch | None:
        """See ``Scheduler``; ``now`` moves on by the steps that the batch stands for."""
        self._leap = self._longest_leap() if self._is_calm else 1
        batch = super().schedule()
        if batch is not None:
            self.now += self._leap
        return batch

    def commit(self, output: StepOutput) -> list[Progress]:
        """See ``Scheduler``."""
        was_decode = all(not planned.is_prefill for planned in self._in_flight[0].planned)
        news = super().commit(output)
        self._is_calm = (
            was_decode
            and self.counters.preemptions == self._seen_preemptions
            and not any(item.is_finished for item in news)
        )
        self._seen_preemptions = self.counters.preemptions
        return news

    def _longest_leap(self) -> int:
        """Steps until the first running request ends, or fewer: as many as free KV slots allow."""
        if not self._running:
            return 1
        leap = min(s.max_total_tokens - s.num_known_tokens for s in self._running)
        while leap > 1 and not self._fits(leap):
            leap //= 2
        return leap

    def _fits(self, leap: int) -> bool:
        """Whether all can decode ``leap`` tokens without an eviction or a preemption."""
        allocated = unpromised = 0
        for state in self._running:
            assert state.holding is not None
            end = state.num_scheduled_tokens + leap
            count = self._grown(state, end) - state.holding.num_slots
            allocated += count
            unpromised += max(count - state.holding.reserved, 0)
        cache = self.cache
        return allocated <= cache.kv.num_available and unpromised <= cache.rows.num_unpromised

    def _grown(self, state: RequestState, end: int) -> int:
        """Slots of the row once it has decoded up to ``end``: it grows by runs of slots."""
        assert state.holding is not None
        runs = -(-(end - state.holding.num_slots) // DECODE_SLOTS)
        reached = state.holding.num_slots + max(runs, 0) * DECODE_SLOTS
        return max(min(reached, state.max_total_tokens), end)

    def _plan_decode(self, batch: BatchBuilder, state: RequestState) -> None:
        if self._leap == 1:
            super()._plan_decode(batch, state)
            return
        end = state.num_scheduled_tokens + self._leap
        self._rows.plan(batch, state, self._leap, num_slots=self._grown(state, end))

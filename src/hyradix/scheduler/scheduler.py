"""Which tokens of which requests run in the next step, and what the last step meant.

Owns: the queue, the running set, steps in flight. Decides; the runner performs.
Does not know: text, tensors, HTTP.

Invariants:
- requests are admitted first come, first served (or longest cached prefix first); one that waits
  for a prefix being computed lets others pass; what can never fit is refused in ``add``;
- the oldest running request always goes on: it may preempt every other, youngest first;
- a step's effects on the cache happen in ``commit``, in the order the steps were submitted;
- a request ends in two phases: it is FINISHING until no step in flight names its row;
- ``schedule`` and ``commit`` never raise on load, exhaustion or a caller's input.
Source: DESIGN section 5. Read next: ``cache/prefix_cache.py``.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque

from hyradix.cache.holding import Holding
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.errors import InvalidParameterError, QueueFullError
from hyradix.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    RowInit,
    RowUpdate,
    ScheduledBatch,
    StepOutput,
)
from hyradix.scheduler.batch_builder import BatchBuilder, PlannedRow
from hyradix.scheduler.door import refuse_impossible
from hyradix.scheduler.progress import InFlight, Progress, SchedulerCounters, TokenSink
from hyradix.scheduler.request_state import RequestState, Status
from hyradix.scheduler.sharing import ask_for_shared, find_provider, is_still_waiting

DECODE_SLOTS = 16
"""KV slots a decoding request takes at a time: short runs keep its slots contiguous."""

MAX_ASKED = 64
"""Queued requests whose common prefix with one being admitted is looked at."""

OVERDUE_STEPS = 256
"""Under longest-prefix order, a request that has waited this long goes first."""


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self, config: EngineConfig, sink: TokenSink, *, cache: PrefixCache | None = None
    ) -> None:
        self.config = config
        self.cache = cache if cache is not None else PrefixCache(config)
        self.counters = SchedulerCounters()
        self.miss_reasons: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self._sink = sink
        self._eos = frozenset(config.eos_token_ids)
        self._waiting: list[RequestState] = []
        self._num_arrived = 0
        self._running: list[RequestState] = []
        self._states: dict[str, RequestState] = {}
        self._in_flight: deque[InFlight] = deque()
        self._kv_updates: list[RowUpdate] = []
        self._step = 0
        self._forced_at = 0

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> RequestState:
        """Queue a request. Raises ``RequestError`` for what can never run, ``QueueFullError``."""
        if request.request_id in self._states:
            raise InvalidParameterError(f"request id {request.request_id!r} is in use")
        refuse_impossible(request, self.config, self.cache)
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests wait already; try again later")
        self._num_arrived += 1
        state = RequestState.create(
            request, max_context=self.config.max_context, arrival=self._num_arrived
        )
        state.arrival_step = self._step
        self._states[request.request_id] = state
        self._waiting.append(state)
        if self.config.prefix_cache:
            for other in self._running:
                ask_for_shared(other, [state], self.cache)
        self.counters.requests += 1
        self.counters.prompt_tokens += state.num_prompt_tokens
        return state

    def abort(self, request_id: str) -> Progress | None:
        """Its client is gone: end it wherever it is. None for an unknown or ended request."""
        state = self._states.get(request_id)
        if state is None or state.status is Status.FINISHING:
            return None
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        self._end(state, FinishReason.ABORT)
        self._come_to_rest(state)
        return Progress(state)

    @property
    def has_work(self) -> bool:
        """Whether a step could be scheduled or waits to be committed."""
        return bool(self._waiting or self._running or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    # ---- schedule -------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """The next step; None when there is nothing to do now."""
        self._force_preemption()
        batch = self._fill()
        if not batch.planned and self.cache.is_anything_quarantined:
            batch = self._fill()  # what preemption gave back may be used: no step was built
        if not batch.planned:
            return None
        batch.kv_updates[:0] = self._kv_updates
        self._kv_updates.clear()
        self._in_flight.append(InFlight(self._step, tuple(batch.planned)))
        self._step += 1
        self.counters.steps += 1
        return batch.build()

    def _fill(self) -> BatchBuilder:
        """Decodes first, oldest first; then prefills under way; then the queue."""
        self.cache.begin_step()
        batch = BatchBuilder(self._step)
        for state in list(self._running):
            if state.can_run and state.num_scheduled_tokens >= state.prefill_end:
                self._plan_decode(batch, state)
        for state in self._running:
            if state.can_run and state.num_scheduled_tokens < state.prefill_end:
                self._plan_prefill(batch, state)
        self._admit_waiting(batch)
        return batch

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet committed."""
        return len(self._in_flight)

    def _budget(self, batch: BatchBuilder) -> int:
        """Prompt tokens that still fit into this step."""
        limit = self.config.max_prefill_tokens
        return (limit - batch.num_prefill_tokens) if limit else 1 << 30

    def _admit_waiting(self, batch: BatchBuilder) -> None:
        admitted: list[RequestState] = []
        for state in self._queue_order():
            if self._budget(batch) <= 0:
                break
            if is_still_waiting(state):
                continue
            verdict = self._admit(batch, state)
            if verdict is None:
                continue
            if not verdict:
                break
            admitted.append(state)
            self._plan_prefill(batch, state)
        for state in admitted:
            self._waiting.remove(state)
            assert state.holding is not None
            self.cache.seal(state.holding)

    def _queue_order(self) -> list[RequestState]:
        """The order in which the queue is tried."""
        queue = list(self._waiting)
        if self.config.order == "longest_prefix" and len(queue) > 1 and self.cache.table.num_free:
            hits = {
                id(q): self.cache.match(
                    q.request.namespace, q.tokens.to_bytes(), limit=q.match_limit
                ).num_cached_tokens
                for q in queue
            }
            overdue = self._step - OVERDUE_STEPS
            queue.sort(key=lambda q: (q.arrival_step > overdue, -hits[id(q)], q.arrival))
        return queue

    def _admit(self, batch: BatchBuilder, state: RequestState) -> bool | None:
        """True: it runs. False: no room. None: it waits for a prefix that is being computed."""
        request, tokens = state.request, state.tokens.to_bytes()
        match = self.cache.match(request.namespace, tokens, limit=state.match_limit)
        if self.config.prefix_cache:
            state.waits_for = find_provider(state, tokens, match, self._running, self.cache)
            if state.waits_for is not None:
                return None
        admission = self.cache.admit(
            match,
            num_prompt_tokens=len(state.tokens),
            num_positions=min(len(state.tokens) + DECODE_SLOTS, state.max_total_tokens),
            boundaries=request.boundaries,
        )
        if admission is None:
            return False
        holding = admission.holding
        state.admit(holding)
        if self.config.prefix_cache:
            ask_for_shared(
                state, [q for q in self._waiting if q is not state][:MAX_ASKED], self.cache
            )
        insort(self._running, state, key=lambda s: s.arrival)
        if state.num_admissions == 1:
            self.counters.cached_tokens += state.num_cached_tokens
            self.miss_reasons[state.miss_reason.value] += 1
        batch.row_inits.append(
            RowInit(holding.row, request.sampling, request.seed, state.num_prompt_tokens)
        )
        batch.token_updates.append(RowUpdate(holding.row, 0, state.tokens.array()))
        if admission.kv_update is not None:
            batch.kv_updates.append(admission.kv_update)
        if admission.state_op is not None:
            batch.state_ops.append(admission.state_op)
        return True

    def _plan_prefill(self, batch: BatchBuilder, state: RequestState) -> None:
        count = min(state.prefill_end - state.num_scheduled_tokens, self._budget(batch))
        if count > 0:
            self._plan(batch, state, count)

    def _plan_decode(self, batch: BatchBuilder, state: RequestState) -> None:
        """One token; preempts younger requests where KV slots are short, at last itself."""
        holding = state.holding
        assert holding is not None
        end = state.num_scheduled_tokens + 1
        num_slots = min(end + DECODE_SLOTS - 1, state.max_total_tokens)
        if end <= holding.num_slots or self.cache.can_extend(holding, num_slots):
            self._plan(batch, state, 1, num_slots=num_slots if end > holding.num_slots else 0)
            return
        while not self.cache.can_extend(holding, end):
            victim = self._victim(batch)
            if victim is None or (victim is state and self.cache.is_anything_quarantined):
                return
            self._preempt(victim)
            if victim is state:
                return
        self._plan(batch, state, 1)

    def _plan(
        self, batch: BatchBuilder, state: RequestState, count: int, *, num_slots: int = 0
    ) -> None:
        """Put ``count`` positions of a request into the step, with the slots they need."""
        holding = state.holding
        assert holding is not None
        start = state.num_scheduled_tokens
        planned = PlannedRow(
            state=state,
            row=holding.row,
            start=start,
            num_tokens=count,
            samples=start + count >= state.num_known_tokens,
            is_prefill=start < state.prefill_end,
            max_nodes=int(start >= state.prefill_end),
        )
        update = self.cache.extend(holding, max(planned.end, num_slots))
        if update is not None:
            batch.kv_updates.append(update)
        self._plan_saves(batch, holding, planned)
        write_from = max(start, holding.num_kv_tokens)
        batch.add_row(planned, write_from=write_from, state_slot=holding.working_slot)
        state.num_scheduled_tokens = planned.end
        state.num_in_flight += 1
        state.num_sampling += planned.samples

    def _plan_saves(self, batch: BatchBuilder, holding: Holding, planned: PlannedRow) -> None:
        cache, step, interval = self.cache, batch.step, self.config.track_interval
        if planned.is_prefill:
            batch.saves += cache.plan_saves(
                holding,
                planned.start,
                planned.end,
                step,
                is_last_chunk=planned.end >= planned.state.prefill_end,
            )
        elif interval and planned.end % interval == 0:
            batch.saves += cache.plan_track(holding, planned.end, step)

    # ---- commit ---------------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take in what the oldest step in flight produced."""
        flight = self._in_flight.popleft()
        assert flight.step == output.step, "steps are committed in the order they were submitted"
        index = {int(row): i for i, row in enumerate(output.rows)}
        prompts = {p.row: p for p in output.prompt_logprobs}
        news: list[Progress] = []
        for planned in flight.planned:
            state = planned.state
            state.num_in_flight -= 1
            state.num_sampling -= planned.samples
            state.num_computed_tokens = planned.end
            if state.status in (Status.RUNNING, Status.PREEMPTED):
                at = index.get(planned.row) if planned.samples else None
                item = self._commit_row(planned, output, at, prompts.get(planned.row))
                if item is not None:
                    news.append(item)
            self._come_to_rest(state)
        return news

    def _commit_row(
        self,
        planned: PlannedRow,
        output: StepOutput,
        at: int | None,
        prompt: PromptLogprobs | None,
    ) -> Progress | None:
        state = planned.state
        if at is not None and output.is_faulty[at]:
            self._end(state, FinishReason.ERROR)
            return Progress(state)
        self._learn(planned, output.step)
        if at is None:
            return Progress(state, prompt_logprobs=prompt) if prompt is not None else None
        sampled = output.token_ids[at, : output.num_tokens[at]].tolist()
        kept = self._accept(state, sampled)
        logprobs = output.logprobs[at] if output.logprobs else None
        return Progress(state, kept, logprobs, prompt)

    def _learn(self, planned: PlannedRow, step: int) -> None:
        """Hand committed states and prompt KV to the cache."""
        state = planned.state
        holding = state.holding
        assert holding is not None
        if not planned.is_prefill and not holding.pending:
            return
        computed = min(planned.end, state.prefill_end - 1) if planned.is_prefill else 0
        if planned.is_prefill:
            self.counters.computed_tokens += planned.num_tokens
        tokens = state.tokens.to_bytes()
        self._kv_updates += self.cache.learn(holding, tokens, computed, step)

    def _accept(self, state: RequestState, sampled: list[int]) -> list[int]:
        """Append sampled tokens up to the first that ends the request; returns those kept."""
        kept, reason, stop_reason = state.cut(sampled, self._eos)
        cut = self._sink.feed(state, kept, reason)
        if cut is not None:
            kept, reason, stop_reason = kept[:cut], FinishReason.STOP, None
        state.tokens.append(kept)
        self.counters.output_tokens += len(kept)
        if reason is not None:
            self._end(state, reason, stop_reason)
        return kept

    # ---- end ------------------------------------------------------------------------------------

    def _end(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        state.end(reason, stop_reason)
        self.finish_reasons[reason.value] += 1
        if state.status is Status.FINISHED:
            del self._states[state.request_id]

    def _victim(self, batch: BatchBuilder) -> RequestState | None:
        """The youngest request that may be preempted now; None: wait for one that drains."""
        if any(state.is_draining for state in self._running):
            return None
        taken = {id(planned.state) for planned in batch.planned}
        candidates = [s for s in self._running if id(s) not in taken]
        return candidates[-1] if candidates else None

    def _preempt(self, state: RequestState) -> None:
        self.counters.preemptions += 1
        state.preempt()
        self._come_to_rest(state)

    def _force_preemption(self) -> None:
        """For tests: every N steps the youngest goes back to the queue.

        It must have got further than the last time it was preempted, or it might never end:
        what it left behind may be evicted before it is back.
        """
        every = self.config.force_preempt_every
        if every and self._step and self._step % every == 0 and self._forced_at != self._step:
            self._forced_at = self._step
            running = [
                s
                for s in self._running
                if s.status is Status.RUNNING and s.num_computed_tokens > s.preempted_at
            ]
            if running:
                self._preempt(running[-1])

    def _come_to_rest(self, state: RequestState) -> None:
        """If no step names the row any more: donate what is worth keeping, give back the rest."""
        if not state.is_draining or state.num_in_flight:
            return
        is_over = state.status is Status.FINISHING
        holding = state.settle() if is_over else state.requeue()
        self._running.remove(state)
        if is_over:
            del self._states[state.request_id]
        else:
            insort(self._waiting, state, key=lambda s: s.arrival)
        if state.finish_reason is FinishReason.ERROR:
            self.cache.release(holding)
            return
        self.cache.finish(
            holding,
            state.tokens.to_bytes(),
            state_depth=state.num_computed_tokens,
            kept=len(state.tokens),
            is_working_donated=is_over or self.config.preempt_donate == "always",
            is_pinned=is_over and state.request.pin,
        )

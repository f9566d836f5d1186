"""Which tokens of which requests run in the next step, and what the last step meant.

Owns: the queue, the running set, steps in flight. Decides; the runner performs.
Does not know: text, tensors, HTTP.

Invariants:
- requests are admitted first come, first served (or longest cached prefix first); one that waits
  for a prefix being computed lets others pass; what can never fit is refused in ``add``;
- the oldest running request always goes on: it may preempt every other, youngest first;
- a step's effects on the cache happen in ``commit``, in the order the steps were submitted;
- ``schedule`` and ``commit`` never raise on load, exhaustion or a caller's input.
Source: DESIGN section 5. Read next: ``rows.py`` (what a row needs), ``departures.py`` (how one
ends), ``cache/prefix_cache.py``.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from dataclasses import replace

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.errors import InvalidParameterError, QueueFullError
from hyradix.request import (
    FinishReason,
    MissReason,
    PromptLogprobs,
    Request,
    RowInit,
    RowUpdate,
    ScheduledBatch,
    StepOutput,
    slot_order,
)
from hyradix.scheduler.automatic_drafting import make_drafting
from hyradix.scheduler.batch_builder import BatchBuilder, PlannedRow
from hyradix.scheduler.departures import Departures, Requests
from hyradix.scheduler.door import refuse_impossible
from hyradix.scheduler.progress import Arrived, InFlight, Progress, SchedulerCounters, TokenSink
from hyradix.scheduler.request_state import RequestState, Status
from hyradix.scheduler.rows import DECODE_SLOTS, RowPlanner
from hyradix.scheduler.sharing import (
    ask_for_shared,
    find_provider,
    is_being_written,
    is_still_waiting,
)
from hyradix.spec_config import RoundCosts

MAX_ASKED = 64
"""Queued requests whose common prefix with one being admitted is looked at."""

OVERDUE_STEPS = 256
"""Under longest-prefix order, a request that has waited this long goes first."""


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self,
        config: EngineConfig,
        sink: TokenSink,
        *,
        cache: PrefixCache | None = None,
        costs: RoundCosts | None = None,
    ) -> None:
        self.config = config
        self.cache = cache if cache is not None else PrefixCache(config)
        self.counters = SchedulerCounters()
        self.miss_reasons: Counter[str] = Counter()
        self._sink = sink
        self._eos = frozenset(config.eos_token_ids)
        self._requests = Requests()
        self._waiting, self._running = self._requests.waiting, self._requests.running
        self._drafting = make_drafting(config.spec, costs)
        self._rows = RowPlanner(config, self.cache, self._drafting)
        self._departures = Departures(config, self.cache, self._requests, self.counters)
        self.finish_reasons = self._departures.finish_reasons
        self._num_arrived = 0
        self._in_flight: deque[InFlight] = deque()
        self._kv_updates: list[RowUpdate] = []
        self._step = 0
        self._last_size: tuple[int, int, int] | None = None

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> RequestState:
        """Queue a request. Raises ``RequestError`` for what can never run, ``QueueFullError``."""
        if request.request_id in self._requests.by_id:
            raise InvalidParameterError(f"request id {request.request_id!r} is in use")
        refuse_impossible(request, self.config, self.cache)
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests wait already; try again later")
        self._num_arrived += 1
        state = RequestState.create(
            request, max_context=self.config.max_context, arrival=self._num_arrived
        )
        state.arrival_step = self._step
        self._requests.by_id[request.request_id] = state
        self._waiting.append(state)
        if self.config.prefix_cache:
            for other in self._running:
                ask_for_shared(other, [state], self.cache)
        self.counters.requests += 1
        self.counters.prompt_tokens += state.num_prompt_tokens
        return state

    def abort(self, request_id: str) -> Progress | None:
        """Its client is gone: end it wherever it is. None for an unknown or ended request."""
        state = self._requests.by_id.get(request_id)
        if state is None or state.status is Status.FINISHING:
            return None
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        self._departures.end(state, FinishReason.ABORT)
        self._departures.come_to_rest(state)
        return Progress(state)

    @property
    def has_work(self) -> bool:
        """Whether a step could be scheduled or waits to be committed."""
        return bool(self._waiting or self._running or self._in_flight)

    @property
    def is_only_settling(self) -> bool:
        """Whether all that is left are replies that are complete: steps in flight, folds."""
        is_over = all(state.status is Status.FINISHING for state in self._running)
        return bool(self._running) and is_over and not self._waiting

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
        self._departures.force_preemption(self._step)
        batch = self._fill()
        if not batch.planned and self.cache.is_anything_quarantined:
            batch = self._fill()  # what preemption gave back may be used: no step was built
        self._departures.add_folds(batch)
        if batch.is_empty:
            return None
        batch.kv_updates[:0] = self._kv_updates
        self._kv_updates.clear()
        planned, folded = tuple(batch.planned), tuple(batch.folded)
        self._in_flight.append(InFlight(self._step, planned, folded, self._rows.depth_of(batch)))
        self._step += 1
        self.counters.steps += 1
        return batch.build()

    def _fill(self) -> BatchBuilder:
        """Decodes first, oldest first; then prefills under way; then the queue."""
        self.cache.begin_step()
        batch = BatchBuilder(self._step)
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in self._running:
            if state.can_run:
                (prefills if state.is_prefill_next else decodes).append(state)
        self._rows.begin_step(decodes, is_waited_for=bool(self._waiting))
        batch.draft_topk = self._drafting.topk
        for state in decodes:
            if state.status is Status.RUNNING:  # preempted by none before it
                self._plan_decode(batch, state)
        for state in prefills:
            if state.status is Status.RUNNING:
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
            if is_being_written(state, match, self._running):
                match = replace(match, reason=MissReason.IN_FLIGHT)
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
        self._drafting.admit(state, self._num_soon(len(batch.row_inits)))
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

    def _num_soon(self, num_admitted: int) -> int:
        """How many may soon run, with the one that is admitted now: those that wait come next.

        num_admitted: before it in this step; they are in both lists, as it is.
        """
        num_waiting = len(self._waiting) - num_admitted - 1
        return min(len(self._running) + num_waiting, self.config.max_requests)

    def _plan_prefill(self, batch: BatchBuilder, state: RequestState) -> None:
        count = min(state.prefill_end - state.num_scheduled_tokens, self._budget(batch))
        if count > 0:
            self._rows.plan(batch, state, count)

    def _plan_decode(self, batch: BatchBuilder, state: RequestState) -> None:
        """The next token; preempts younger requests where KV slots are short, at last itself."""
        if self._rows.plan_decode(batch, state):
            return
        assert state.holding is not None
        end = state.num_scheduled_tokens + 1
        while not self.cache.rows.can_extend(state.holding, end):
            victim = self._departures.victim(batch)
            if victim is None or (victim is state and self.cache.is_anything_quarantined):
                return
            self._departures.preempt(victim)
            if victim is state:
                return
        self._rows.plan(batch, state, 1)

    # ---- commit ---------------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take in what the oldest step in flight produced."""
        flight = self._in_flight.popleft()
        assert flight.step == output.step, "steps are committed in the order they were submitted"
        arrived = Arrived.of(output)
        prompts = {p.row: p for p in output.prompt_logprobs}
        news: list[Progress] = []
        for planned in flight.planned:
            state = planned.state
            at = arrived.at.get(planned.row) if planned.samples else None
            self._arrive(planned, arrived, at)
            if state.status in (Status.RUNNING, Status.PREEMPTED):
                prompt = prompts.get(planned.row) if prompts else None
                item = self._commit_row(planned, arrived, at, prompt)
                if item is not None:
                    news.append(item)
            if not state.num_in_flight:
                self._departures.come_to_rest(state)
        for state in flight.folded:
            self._departures.commit_fold(state)
        self._last_size = flight.size(output)
        return news

    def note_time(self, seconds: float) -> None:
        """The turn of the loop that committed the last step took ``seconds``."""
        if self._last_size is not None:
            self._drafting.learn_time(*self._last_size, seconds)
            self._last_size = None

    def _arrive(self, planned: PlannedRow, arrived: Arrived, at: int | None) -> None:
        """How far the row has come: a decode consumes as many positions as it brings tokens."""
        state, num_consumed = planned.state, planned.num_tokens
        if at is None:
            state.leave_step(planned.end, sampled=planned.samples)
            return
        state.is_faulty |= arrived.is_faulty[at]
        if not planned.is_prefill and not state.is_faulty:
            num_consumed = arrived.num_tokens[at]
            most = max(planned.num_tokens, planned.max_accepted)
            is_possible = planned.num_tokens <= num_consumed <= most
            assert is_possible, "more or less than could be consumed"
        state.leave_step(planned.start + num_consumed, sampled=planned.samples)
        if planned.has_drafts and not state.is_faulty:
            self._take_in_drafts(planned, arrived.output, at)

    def _take_in_drafts(self, planned: PlannedRow, output: StepOutput, at: int) -> None:
        """The slots of the nodes that were consumed become those of their positions."""
        state, num_nodes = planned.state, int(output.num_nodes[at])
        assert state.holding is not None
        assert num_nodes <= planned.max_nodes
        if num_nodes == 1:
            self._drafting.learn(state, 1, 0, 0)
            return
        path = output.paths[at, : output.num_tokens[at]]
        self.cache.rows.reorder(state.holding, planned.start, slot_order(path, num_nodes))
        self.counters.draft_rounds += 1
        self.counters.draft_tokens += num_nodes - 1
        self.counters.accepted_tokens += len(path) - 1
        depth = min(num_nodes, planned.max_accepted) - 1
        self._drafting.learn(state, num_nodes, len(path) - 1, depth)

    def _commit_row(
        self,
        planned: PlannedRow,
        arrived: Arrived,
        at: int | None,
        prompt: PromptLogprobs | None,
    ) -> Progress | None:
        state = planned.state
        if state.is_faulty:
            self._departures.end(state, FinishReason.ERROR)
            return Progress(state)
        kept: list[int] = []
        if at is not None:
            kept = self._accept(state, arrived.token_ids[at][: arrived.num_tokens[at]])
        if planned.is_prefill or (state.holding is not None and state.holding.pending):
            self._learn(planned, arrived.output.step)
        if at is None:
            return Progress(state, prompt_logprobs=prompt) if prompt is not None else None
        logprobs = arrived.output.logprobs[at] if arrived.output.logprobs else None
        return Progress(state, kept, logprobs, prompt)

    def _learn(self, planned: PlannedRow, step: int) -> None:
        """Hand committed states and prompt KV to the cache."""
        state = planned.state
        holding = state.holding
        assert holding is not None
        computed = min(planned.end, state.prefill_end - 1) if planned.is_prefill else 0
        if planned.is_prefill:
            self.counters.computed_tokens += planned.num_tokens
        tokens = state.tokens.to_bytes()
        consumed = state.num_computed_tokens
        self._kv_updates += self.cache.learn(holding, tokens, computed, step, num_consumed=consumed)

    def _accept(self, state: RequestState, sampled: list[int]) -> list[int]:
        """Append sampled tokens up to the first that ends the request; returns those kept."""
        kept, reason, stop_reason = state.cut(sampled, self._eos)
        cut = self._sink.feed(state, kept, reason)
        if cut is not None:
            kept, reason, stop_reason = kept[:cut], FinishReason.STOP, None
        state.tokens.append(kept)
        self.counters.output_tokens += len(kept)
        if reason is not None:
            self._departures.end(state, reason, stop_reason)
        return kept

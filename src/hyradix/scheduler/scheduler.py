"""Which tokens of which requests run in the next step, and what the last step meant.

Owns: the queue, the running set, steps in flight. Decides; the runner performs.
Does not know: text, tensors, HTTP.

Invariants:
- requests are admitted first come, first served; what can never fit is refused in ``add``;
- a step's effects on the cache happen in ``commit``, in the order the steps were submitted;
- a request ends in two phases: it is FINISHING until no step in flight names its row;
- ``schedule`` and ``commit`` never raise on load, exhaustion or a caller's input.
Source: DESIGN section 5. Read next: ``cache/prefix_cache.py``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hyradix.cache.holding import Holding
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.errors import (
    CapacityError,
    ContextLengthError,
    InvalidParameterError,
    QueueFullError,
)
from hyradix.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    RowInit,
    RowUpdate,
    ScheduledBatch,
    StepOutput,
    TokenLogprobs,
)
from hyradix.scheduler.batch_builder import BatchBuilder, PlannedRow
from hyradix.scheduler.request_state import RequestState, Status

DECODE_SLOTS = 16
"""KV slots a decoding request takes at a time: short runs keep its slots contiguous."""


class TokenSink(Protocol):
    """The text side of a request, asked about every committed token."""

    def feed(
        self, state: RequestState, token_ids: list[int], reason: FinishReason | None
    ) -> int | None:
        """How many of ``token_ids`` are kept if a stop string completes inside them, else None.

        ``reason``: why the last of them ends the request, if it does.
        """
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one request after a commit."""

    state: RequestState
    token_ids: Sequence[int] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this is the last news."""
        return self.state.finish_reason is not None


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    planned: tuple[PlannedRow, ...]


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts since start."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """See the module's docstring."""

    def __init__(self, config: EngineConfig, sink: TokenSink) -> None:
        self.config = config
        self.cache = PrefixCache(config)
        self.counters = SchedulerCounters()
        self.miss_reasons: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self._sink = sink
        self._eos = frozenset(config.eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._states: dict[str, RequestState] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._kv_updates: list[RowUpdate] = []
        self._step = 0

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> RequestState:
        """Queue a request. Raises ``RequestError`` for what can never run, ``QueueFullError``."""
        self._refuse_impossible(request)
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests wait already; try again later")
        state = RequestState.create(request, max_context=self.config.max_context)
        self._states[request.request_id] = state
        self._waiting.append(state)
        self.counters.requests += 1
        self.counters.prompt_tokens += state.num_prompt_tokens
        return state

    def _refuse_impossible(self, request: Request) -> None:
        config, length = self.config, request.num_prompt_tokens
        if request.request_id in self._states:
            raise InvalidParameterError(f"request id {request.request_id!r} is in use")
        if length == 0:
            raise InvalidParameterError("the prompt has no tokens", param="prompt")
        if length >= config.max_context:
            raise ContextLengthError(
                f"the prompt has {length} tokens; with at least one token of reply that is over "
                f"the limit of {config.max_context} tokens",
                param="prompt",
            )
        ids = request.prompt_array()
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise InvalidParameterError(
                f"the prompt names token ids outside the vocabulary (size {config.vocab_size})",
                param="prompt",
            )
        request.sampling.validate(vocab_size=config.vocab_size)
        needed = RequestState.create(request, max_context=config.max_context).max_total_tokens
        if needed > config.num_kv_slots:
            raise CapacityError(
                f"the request needs {needed} KV slots (prompt {length} + reply) and the pool has "
                f"{config.num_kv_slots}; lower max_tokens or shorten the prompt",
                param="max_tokens",
            )

    def abort(self, request_id: str) -> Progress | None:
        """Its client is gone: end it wherever it is. None for an unknown or ended request."""
        state = self._states.get(request_id)
        if state is None or state.status not in (Status.WAITING, Status.RUNNING):
            return None
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        self._end(state, FinishReason.ABORT)
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
        self.cache.begin_step()
        batch = BatchBuilder(self._step)
        for state in self._running:
            if state.can_run and state.num_scheduled_tokens >= state.prefill_end:
                self._plan(batch, state, 1)
        for state in self._running:
            if state.can_run and state.num_scheduled_tokens < state.prefill_end:
                self._plan_prefill(batch, state)
        admitted = self._admit_waiting(batch)
        for state in admitted:
            assert state.holding is not None
            self.cache.seal(state.holding)
        if not batch.planned:
            return None
        batch.kv_updates[:0] = self._kv_updates
        self._kv_updates.clear()
        self._in_flight.append(_InFlight(self._step, tuple(batch.planned)))
        self._step += 1
        self.counters.steps += 1
        return batch.build()

    def _budget(self, batch: BatchBuilder) -> int:
        """Prompt tokens that still fit into this step."""
        limit = self.config.max_prefill_tokens
        return (limit - batch.num_prefill_tokens) if limit else 1 << 30

    def _admit_waiting(self, batch: BatchBuilder) -> list[RequestState]:
        admitted: list[RequestState] = []
        while self._waiting and self._budget(batch) > 0:
            state = self._waiting[0]
            if not self._admit(batch, state):
                break
            self._waiting.popleft()
            admitted.append(state)
            self._plan_prefill(batch, state)
        return admitted

    def _admit(self, batch: BatchBuilder, state: RequestState) -> bool:
        request = state.request
        match = self.cache.match(
            request.namespace, state.tokens.to_bytes(), limit=state.match_limit
        )
        admission = self.cache.admit(
            match,
            num_prompt_tokens=len(state.tokens),
            num_positions=state.max_total_tokens,
            boundaries=request.boundaries,
        )
        if admission is None:
            return False
        holding = admission.holding
        state.admit(holding)
        self._running.append(state)
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

    def _plan(self, batch: BatchBuilder, state: RequestState, count: int) -> None:
        """Put ``count`` positions of a request into the step, with the slots they need."""
        holding = state.holding
        assert holding is not None
        start = state.num_scheduled_tokens
        planned = PlannedRow(
            state=state,
            row=holding.row,
            start=start,
            num_tokens=count,
            samples=start + count == state.num_known_tokens,
            is_prefill=start < state.prefill_end,
        )
        if planned.end > holding.num_slots:
            spare = 0 if planned.is_prefill else DECODE_SLOTS - 1
            update = self.cache.extend(holding, min(planned.end + spare, state.max_total_tokens))
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
            if state.status is Status.RUNNING:
                at = index.get(planned.row) if planned.samples else None
                item = self._commit_row(planned, output, at, prompts.get(planned.row))
                if item is not None:
                    news.append(item)
            if state.status is Status.FINISHING and state.num_in_flight == 0:
                self._settle(state)
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
        kept, reason, stop_reason = self._cut(state, sampled)
        cut = self._sink.feed(state, kept, reason)
        if cut is not None:
            kept, reason, stop_reason = kept[:cut], FinishReason.STOP, None
        state.tokens.append(kept)
        self.counters.output_tokens += len(kept)
        if reason is not None:
            self._end(state, reason, stop_reason)
        return kept

    def _cut(
        self, state: RequestState, sampled: list[int]
    ) -> tuple[list[int], FinishReason | None, int | None]:
        """Where end-of-sequence, a stop token or the length limit ends ``sampled``."""
        sampling = state.request.sampling
        for i, token in enumerate(sampled):
            num_output = state.num_output_tokens + i + 1
            if num_output >= sampling.min_tokens:
                if token in self._eos and not sampling.ignore_eos:
                    return sampled[: i + 1], FinishReason.STOP, None
                if token in state.stop_ids:
                    return sampled[: i + 1], FinishReason.STOP, token
            if state.num_prompt_tokens + num_output >= state.max_total_tokens:
                return sampled[: i + 1], FinishReason.LENGTH, None
        return sampled, None, None

    # ---- end ------------------------------------------------------------------------------------

    def _end(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        state.end(reason, stop_reason)
        self.finish_reasons[reason.value] += 1
        if state.status is Status.FINISHED:
            del self._states[state.request_id]
        elif state.num_in_flight == 0 and reason is FinishReason.ABORT:
            self._settle(state)

    def _settle(self, state: RequestState) -> None:
        """The request is quiet: donate what is worth keeping, give the rest back."""
        holding = state.settle()
        self._running.remove(state)
        del self._states[state.request_id]
        if state.finish_reason is FinishReason.ERROR:
            self.cache.release(holding)
            return
        self.cache.finish(
            holding,
            state.tokens.to_bytes(),
            state_depth=state.num_computed_tokens,
            kept=len(state.tokens),
        )

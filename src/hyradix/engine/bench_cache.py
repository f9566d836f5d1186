"""``hyradix bench cache``: the control plane alone over a workload, in virtual time.

The real scheduler and the real cache run; the data plane knows the replies and computes nothing.
Rules, so that figures compare: a whole prefill is one step; a reply of m tokens to a prompt of n
is donated at n + m - 1 (its last token is never fed back); no tracks. Concurrency C is a closed
loop: C requests are in the system at any time, and when one ends the earliest of those whose
parent has ended enters. Every running request decodes one token a step.

Owns: the loop and the report. Does not know: tensors, text.
Read next: ``scheduler/leaping.py`` (why not every step is a batch), ``bench_workload.py``.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyradix.cache.timed import TimedCache
from hyradix.config import DeviceFacts, EngineConfig, ModelFacts, Settings, resolve
from hyradix.engine.bench_workload import WorkloadRequest
from hyradix.errors import CapacityError, ConfigError
from hyradix.request import (
    Boundary,
    BoundaryKind,
    FinishReason,
    Request,
    SamplingParams,
    ScheduledBatch,
    StepOutput,
)
from hyradix.scheduler.leaping import LeapingScheduler
from hyradix.scheduler.request_state import RequestState
from hyradix.scheduler.rows import DECODE_SLOTS

_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured. 0 KV slots or states: as many as could ever be used; no more are made."""

    kv_slots: int
    states: int
    policy: str = "lru"
    concurrency: int = 1
    use_marks: bool = True
    min_gain: int = _DEFAULTS.min_gain
    max_checkpoints: int = _DEFAULTS.max_checkpoints


def bench_cache(
    workload: list[WorkloadRequest],
    options: BenchOptions,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """Run ``workload``; the report, ready for JSON. Raises ``ConfigError``.

    ``on_progress`` is told the number of finished requests.
    """
    loop = ClosedLoop(workload, options)
    start = time.perf_counter()
    loop.run(on_progress)
    return loop.report(time.perf_counter() - start)


def make_config(workload: list[WorkloadRequest], options: BenchOptions) -> EngineConfig:
    """Pools and limits for the workload. Raises ``ConfigError``.

    A request leaves at most its checkpoints, the end of its reply, and one for each that waits.
    """
    for name in ("kv_slots", "states"):
        if getattr(options, name) < 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} must not be negative (0: unlimited), "
                f"got {getattr(options, name)}",
                param=name,
            )
    if options.concurrency < 1:
        raise ConfigError(
            f"--concurrency must be positive, got {options.concurrency}", param="concurrency"
        )
    if not workload:
        raise ConfigError("the workload holds no requests", param="file")
    lengths = [request.num_prompt_tokens + len(request.output) for request in workload]
    rows = min(options.concurrency, len(workload))
    if 0 < options.states < rows:
        raise ConfigError(
            f"--states {options.states} is less than --concurrency {rows}: every running request "
            "needs one",
            param="states",
        )
    most_kv = sum(lengths) + rows * DECODE_SLOTS
    kv_slots = min(options.kv_slots or most_kv, most_kv)
    each = max(options.max_checkpoints, 2) + 2
    settings = Settings(
        kv_slots=kv_slots,
        # one for each token there is room for, at most, and what running requests are writing
        states=min(options.states or each * (len(workload) + rows), kv_slots + each * rows),
        policy=options.policy,
        max_requests=rows,
        max_context=max(lengths) + 1,
        max_prefill_tokens=0,
        track_interval=0,
        min_gain=options.min_gain,
        max_checkpoints=options.max_checkpoints,
        max_queue=rows + 1,
    )
    biggest = max(
        max(int(np.frombuffer(r.prompt, dtype="<i4").max()), int(r.output.max())) for r in workload
    )
    facts = ModelFacts(
        name="none",
        architecture="none",
        vocab_size=biggest + 1,
        max_position=max(lengths) + 1,
        kv_bytes_per_slot=1,
        state_bytes_per_slot=1,
        eos_token_ids=(),
    )
    return resolve(settings, facts, DeviceFacts(kind="cpu", free_bytes=1))


class ClosedLoop:
    """See the module's docstring. Plays the engine, the data plane and the clients."""

    def __init__(self, workload: list[WorkloadRequest], options: BenchOptions) -> None:
        self.config = make_config(workload, options)
        self.cache = TimedCache(self.config)
        self.scheduler = LeapingScheduler(self.config, self, self.cache)
        self.states: dict[int, RequestState] = {}
        """Requests in the system, by index."""
        self.finished: list[RequestState] = []
        """In the order they ended."""
        self.peak_kv = self.peak_states = 0
        self._workload = workload
        self._options = options
        self._children: dict[int, list[int]] = {}
        self._ready: list[int] = []
        for index, request in enumerate(workload):
            if request.parent < 0:
                self._ready.append(index)
            else:
                self._children.setdefault(request.parent, []).append(index)

    def feed(
        self, state: RequestState, token_ids: list[int], reason: FinishReason | None
    ) -> int | None:
        """As the scheduler's text side: there are no stop strings."""
        return None

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Serve every request."""
        self._arrive()
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            assert batch is not None, "work is left but nothing was scheduled"
            self._note_peak()
            count = len(self.finished)
            for news in self.scheduler.commit(self._compute(batch)):
                if news.is_finished:
                    self._depart(news.state)
            if len(self.finished) > count:
                self._arrive()
                if on_progress is not None:
                    on_progress(len(self.finished))
        assert len(self.finished) == len(self._workload)

    def _arrive(self) -> None:
        while self._ready and len(self.states) < self._options.concurrency:
            index = heapq.heappop(self._ready)
            given = self._workload[index]
            request = Request(
                request_id=str(index),
                prompt_token_ids=given.prompt,
                sampling=SamplingParams(max_tokens=len(given.output), ignore_eos=True),
                seed=0,
                boundaries=self._boundaries(given),
            )
            try:
                self.states[index] = self.scheduler.add(request)
            except CapacityError as error:
                raise ConfigError(
                    f"request {index} can never run: {error.message}", param="kv_slots"
                ) from None

    def _boundaries(self, request: WorkloadRequest) -> tuple[Boundary, ...]:
        marks = request.marks if self._options.use_marks else ()
        return tuple(Boundary(position, BoundaryKind.MARK) for position in marks)

    def _depart(self, state: RequestState) -> None:
        index = int(state.request_id)
        del self.states[index]
        self.finished.append(state)
        for child in self._children.pop(index, ()):
            heapq.heappush(self._ready, child)

    def _compute(self, batch: ScheduledBatch) -> StepOutput:
        """The given replies: after positions up to ``end``, every token that follows them."""
        running = {
            state.holding.row: (index, state)
            for index, state in self.states.items()
            if state.holding is not None
        }
        sampling = np.flatnonzero(batch.samples)
        tokens = []
        for i in sampling:
            index, state = running[int(batch.rows[i])]
            end = int(batch.starts[i]) + int(batch.num_tokens[i])
            first = state.num_output_tokens
            tokens.append(self._workload[index].output[first : end - state.num_prompt_tokens + 1])
        table = np.full((len(tokens), max(map(len, tokens), default=1)), -1, dtype=np.int32)
        for at, part in enumerate(tokens):
            table[at, : len(part)] = part
        return StepOutput(
            step=batch.step,
            rows=batch.rows[sampling],
            token_ids=table,
            num_tokens=np.array([len(part) for part in tokens], dtype=np.int32),
            is_faulty=np.zeros(len(tokens), dtype=np.bool_),
            paths=np.zeros((len(tokens), 1), dtype=np.int32),
            num_nodes=np.ones(len(tokens), dtype=np.int32),
        )

    def _note_peak(self) -> None:
        kv, states = self.cache.kv, self.cache.states
        self.peak_kv = max(self.peak_kv, kv.num_total - kv.num_free)
        self.peak_states = max(self.peak_states, states.num_total - states.num_free)

    def report(self, seconds: float) -> dict[str, object]:
        """What came of it. ``cached_tokens`` are those of each request's first admission."""
        counters, cached = self.scheduler.counters, self.scheduler.counters.cached_tokens
        return {
            "hit_ratio": round(cached / counters.prompt_tokens, 6),
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": cached,
            "output_tokens": counters.output_tokens,
            "requests": counters.requests,
            "steps": self.scheduler.now,
            "kv_slots": self._options.kv_slots,
            "states": self._options.states,
            "policy": self._options.policy,
            "concurrency": self._options.concurrency,
            "marks": self._options.use_marks,
            "peak": {"kv": self.peak_kv, "states": self.peak_states},
            "evictions": {
                "kv": self.cache.counters.evicted_kv,
                "states": self.cache.counters.evicted_states,
            },
            "skipped_saves": self.cache.counters.skipped_saves,
            "moved_states": self.cache.counters.moved_states,
            "preemptions": counters.preemptions,
            "miss_reasons": dict(sorted(self.scheduler.miss_reasons.items())),
            "op_us": self.cache.times.summary(),
            "seconds": round(seconds, 3),
        }

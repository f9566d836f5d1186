"""Drives the real scheduler and cache with the fake data plane.

``Harness`` plays the engine: add, abort, step; it checks invariants after every operation,
poisons what is free or newly handed out, and collects each request's tokens and cache figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hyradix.cache.invariants import check, check_idle
from hyradix.config import DeviceFacts, EngineConfig, ModelFacts, Settings, resolve
from hyradix.request import (
    Boundary,
    FinishReason,
    Namespace,
    Request,
    SamplingParams,
    ScheduledBatch,
)
from hyradix.scheduler.progress import Progress
from hyradix.scheduler.request_state import RequestState
from hyradix.scheduler.scheduler import Scheduler
from hyradix.spec_config import PROPOSERS
from tests.support.fake_runner import EMPTY, FakeRunner, kv_content, reference_output
from tests.support.fake_states import consume
from tests.support.slot_watch import SlotWatch

VOCAB = 50_000


def make_config(**options: object) -> EngineConfig:
    """A config for the fake model; unlimited chunks, no drafts, 4096 KV slots, unless told."""
    defaults = {
        "kv_slots": 4096,
        "states": 64,
        "max_requests": 8,
        "max_context": 2048,
        "max_prefill_tokens": 0,
    }
    facts = ModelFacts(
        name="fake",
        architecture="fake",
        vocab_size=VOCAB,
        max_position=1 << 20,
        kv_bytes_per_slot=8,
        state_bytes_per_slot=64,
        eos_token_ids=(1,),
        proposers=PROPOSERS,
    )
    device = DeviceFacts(kind="cpu", free_bytes=1 << 30)
    return resolve(Settings.from_options(**{**defaults, **options}), facts, device)


@dataclass
class Record:
    """What happened to one request."""

    prompt: list[int]
    max_tokens: int
    state: RequestState
    output: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and reply."""
        return self.prompt + self.output


@dataclass
class Harness:
    """See the module's docstring. ``stop_after``: request id -> kept tokens, plays stop strings."""

    config: EngineConfig
    is_checking: bool = True
    max_in_flight: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.config, self.seed)
        self.scheduler = Scheduler(self.config, self)
        self.cache = self.scheduler.cache
        self.watch = SlotWatch(self.cache)
        self.records: dict[str, Record] = {}
        self.stop_at: dict[str, int] = {}
        self._count = 0

    def feed(
        self, state: RequestState, token_ids: list[int], reason: FinishReason | None
    ) -> int | None:
        """Plays the text side: a 'stop string' completes at output token ``stop_at``."""
        at = self.stop_at.get(state.request_id)
        if at is not None and state.num_output_tokens < at <= state.num_output_tokens + len(
            token_ids
        ):
            return at - state.num_output_tokens
        return None

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        adapter: str = "",
        stop_at: int | None = None,
        **sampling: object,
    ) -> Record:
        """Queue a request."""
        self._count += 1
        request_id = f"r{self._count}"
        if stop_at is not None:
            self.stop_at[request_id] = stop_at
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling=params,
            seed=0,
            boundaries=tuple(boundaries),
            namespace=Namespace(adapter, salt),
        )
        state = self.scheduler.add(request)
        self.records[request_id] = Record(list(prompt), max_tokens, state)
        return self.records[request_id]

    def step(self) -> bool:
        """One turn of the engine's loop; False when there was nothing to do.

        With overlap, up to ``max_in_flight`` steps run while the next one is built.
        """
        batch = self.begin()
        room = self.max_in_flight if self.config.overlap and batch is not None else 0
        was_busy = batch is not None or self.scheduler.num_in_flight > 0
        while self.scheduler.num_in_flight > room:
            self.commit()
        return was_busy

    def begin(self) -> ScheduledBatch | None:
        """Schedule and submit one step; None when there was nothing to schedule."""
        batch = self.scheduler.schedule()
        self._check()
        if batch is not None:
            self.watch.check(batch)
            self._check_budget()
            for holding in self.cache.holdings.values():
                is_sealed = holding.receipt is None or holding.receipt.state_node is None
                assert is_sealed, "a state lock outlives the batch that needed it"
            self._poison()
            self.runner.submit(batch)
        return batch

    def _check_budget(self) -> None:
        """A step computes no more prompt tokens than the config allows."""
        planned = self.scheduler._in_flight[-1].planned
        num_prefill = sum(row.num_tokens for row in planned if row.is_prefill)
        limit = self.config.max_prefill_tokens
        assert not limit or num_prefill <= limit, f"{num_prefill} prompt tokens in one step"

    def commit(self) -> None:
        """Commit the oldest step in flight."""
        for news in self.scheduler.commit(self.runner.collect()):
            self._note(news)
        self._check()
        self._check_tables()
        self._poison()

    def _check_tables(self) -> None:
        """Both planes agree on the slots of every row that no step in flight names."""
        updates = [*self.runner.kv_updates_in_flight(), *self.scheduler._kv_updates]
        for state in self.scheduler._running:
            if state.num_in_flight == 0 and state.holding is not None:
                row, count = state.holding.row, state.holding.num_slots
                theirs = self.runner.kv_slots[row].copy()
                for update in updates:
                    if update.row == row:
                        theirs[update.start : update.start + len(update.values)] = update.values
                mine = self.cache.table.kv_slots[row, :count]
                assert (theirs[:count] == mine).all(), "the planes disagree on a row's slots"

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until idle (or ``until``)."""
        for _ in range(20_000):  # a token a step, preempted every other step: it is many
            if not self.scheduler.has_work or (until is not None and until()):
                return
            assert self.step(), "work is left but nothing was scheduled"
        raise AssertionError("the scheduler does not come to an end")

    def serve(self, prompt: Sequence[int], max_tokens: int = 4, **options: object) -> Record:
        """Add one request and run until idle; its output is checked against the oracle."""
        record = self.add(prompt, max_tokens, **options)
        self.run()
        self.verify(record)
        return record

    def abort(self, record: Record) -> None:
        """The client is gone."""
        news = self.scheduler.abort(record.state.request_id)
        if news is not None:
            self._note(news)
        self._check()

    def verify(self, record: Record) -> None:
        """O1: what was produced is what a cold run produces."""
        expected = reference_output(record.prompt, len(record.output), self.config.vocab_size)
        assert record.output == expected, f"{record.state.request_id}: not what a cold run says"

    def finish(self) -> None:
        """Run until idle, then O1 for all and O2."""
        self.run()
        for record in self.records.values():
            self.verify(record)
        check_idle(self.cache)
        self.check_contents()

    def check_contents(self) -> None:
        """At rest: every slot of the tree holds exactly what its tokens make of it."""
        roots = self.cache.tree.roots().values()
        below = [(child, EMPTY) for root in roots for child in root.children.values()]
        while below:
            node, state = below.pop()
            for token, slot in zip(np.frombuffer(node.key, "<i4"), node.kv_slots, strict=True):
                state = consume(state, int(token))
                assert self.runner.kv[slot] == kv_content(state), "KV of other tokens is published"
            if node.state is not None:
                exact = self.runner.states[node.state.slot] == state
                assert exact, f"the state at {node.depth} is not that of its tokens"
            below += [(child, state) for child in node.children.values()]

    def _note(self, news: Progress) -> None:
        record = self.records[news.state.request_id]
        record.output += news.token_ids
        record.reason = news.state.finish_reason

    def _check(self) -> None:
        if self.is_checking:
            check(self.cache)

    def _poison(self) -> None:
        """In stream order: what is free, and what the next step is the first to write."""
        taken_kv, taken_states = self.watch.take()
        free = np.concatenate([np.flatnonzero(self.cache.kv._is_free), *taken_kv])
        states = np.flatnonzero(self.cache.states.phase[1:] == 0) + 1
        self.runner.poison(free, [*states.tolist(), *taken_states])

"""A data plane without a model: it finds faults of bookkeeping, exactly and in microseconds.

A state slot holds the hash of the tokens consumed; a KV slot holds that hash as it was at its
position (keys and values of deeper layers depend on the whole prefix, not on their token alone).
The next token is computed only from the CONTENTS of the row's state slot and of every KV slot that
the row reads, never from the token list: a wrong slot, a state at the wrong depth, a freed slot
or a missing copy changes the output. Freed memory can be poisoned. StateOps of a step are done in
parallel: all sources are read before any destination is written. Rows run in parallel too: no row
may read or write what another writes in the same step. A step runs when it is collected, not when
it is submitted: whatever the host did meanwhile must not be seen by it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hyradix.config import EngineConfig
from hyradix.request import ScheduledBatch, StateOpKind, StepOutput

POISON = -777
EMPTY = 0


def consume(state: int, token: int) -> int:
    """The state after one more token."""
    return xxhash.xxh3_64_intdigest(
        int(state).to_bytes(8, "little") + int(token).to_bytes(8, "little", signed=True)
    )


def kv_content(state: int) -> int:
    """What a KV slot holds for the token that led to ``state``; never negative, as poison is."""
    return state >> 1


def next_token(state: int, kv: np.ndarray, vocab_size: int) -> int:
    """What the model says in ``state`` when it reads ``kv``: ``int64``, one per token."""
    digest = xxhash.xxh3_64(int(state).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(kv, dtype=np.int64).tobytes())
    return digest.intdigest() % vocab_size


def reference_output(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The reply of a cold run: the oracle O1 for the fake model."""
    state, out = EMPTY, []
    kv = np.empty(len(prompt) + count, dtype=np.int64)
    for i, token in enumerate(prompt):
        state = consume(state, token)
        kv[i] = kv_content(state)
    for end in range(len(prompt), len(prompt) + count):
        token = next_token(state, kv[:end], vocab_size)
        out.append(token)
        state = consume(state, token)
        kv[end] = kv_content(state)
    return out


@dataclass
class FakeRunner:
    """See the module's docstring. ``log`` keeps every batch."""

    config: EngineConfig
    log: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.config
        self.kv = np.full(c.num_kv_slots + 1, POISON, dtype=np.int64)
        self.states: list[int | None] = [None] * (c.num_states + 1)
        self.tokens = np.full((c.max_requests, c.max_context + 1), POISON, dtype=np.int64)
        self.kv_slots = np.zeros((c.max_requests, c.max_context), dtype=np.int64)
        self._stream: deque[ScheduledBatch | tuple[np.ndarray, list[int]]] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue a step; it runs when somebody collects it (as late as a device may)."""
        self.log.append(batch)
        self._check(batch)
        self._stream.append(batch)

    def poison(self, kv_slots: np.ndarray, states: list[int]) -> None:
        """Spoil freed memory, in stream order: steps in flight may still read it, later not."""
        self._stream.append((kv_slots, states))

    def collect(self) -> StepOutput:
        """Run the stream up to the end of the oldest step."""
        while True:
            work = self._stream.popleft()
            if isinstance(work, ScheduledBatch):
                return self._run(work)
            self.kv[work[0]] = POISON
            for slot in work[1]:
                self.states[slot] = None

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        for init in batch.row_inits:
            self.tokens[init.row] = POISON
            self.kv_slots[init.row] = 0
        for update in batch.token_updates:
            self.tokens[update.row, update.start : update.start + len(update.values)] = (
                update.values
            )
        for update in batch.kv_updates:
            self.kv_slots[update.row, update.start : update.start + len(update.values)] = (
                update.values
            )
        self._check_rows(batch)
        values = [self._source(op) for op in batch.state_ops]
        for op, value in zip(batch.state_ops, values, strict=True):
            self.states[op.destination] = value
        saves = {(s.row, s.depth): s.slot for s in batch.saves}
        assert len(saves) == len(batch.saves), "two saves at one point"
        sampled = []
        written: list[tuple[int, int]] = []
        for i in range(batch.num_rows):
            token = self._forward(batch, i, saves, written)
            if batch.samples[i]:
                sampled.append((int(batch.rows[i]), token))
        for slot, value in written:
            self.states[slot] = value
        assert not saves, f"saves at positions that were not computed: {saves}"
        rows = np.array([row for row, _ in sampled], dtype=np.int32)
        return StepOutput(
            step=batch.step,
            rows=rows,
            token_ids=np.array([[t] for _, t in sampled], dtype=np.int32).reshape(-1, 1),
            num_tokens=np.ones(len(sampled), dtype=np.int32),
            is_faulty=np.zeros(len(sampled), dtype=np.bool_),
            paths=np.zeros((len(sampled), 1), dtype=np.int32),
            num_nodes=np.ones(len(sampled), dtype=np.int32),
        )

    def _source(self, op) -> int | None:
        if op.kind is StateOpKind.CLEAR:
            return EMPTY
        assert self.states[op.source] is not None, "a copy of a state that nobody wrote"
        return self.states[op.source]

    def _forward(self, batch: ScheduledBatch, i: int, saves: dict, written: list) -> int:
        row, start, count = int(batch.rows[i]), int(batch.starts[i]), int(batch.num_tokens[i])
        slot = int(batch.state_slots[i])
        state = self.states[slot]
        assert state is not None, "the working state was never written"
        for position in range(start, start + count):
            token = int(self.tokens[row, position])
            assert token >= 0, "a token that nobody wrote"
            kv_slot = int(self.kv_slots[row, position])
            assert kv_slot > 0, "a live row writes or reads the sink"
            state = consume(state, token)
            if position >= batch.write_from[i]:
                self.kv[kv_slot] = kv_content(state)
            save = saves.pop((row, position + 1), None)
            if save is not None:
                written.append((save, state))
        written.append((slot, state))
        end = start + count
        slots = self.kv_slots[row, :end]
        assert len(np.unique(slots)) == end, "a row names one KV slot twice"
        assert (self.kv[slots] >= 0).all(), "a row reads KV that nobody wrote"
        token = next_token(state, self.kv[slots], self.config.vocab_size)
        if batch.samples[i]:
            self.tokens[row, end] = token
        return token

    def _check_rows(self, batch: ScheduledBatch) -> None:
        """Rows run in parallel: what one writes, no other reads or writes in this step."""
        writers = np.zeros(len(self.kv), dtype=np.int64)
        parts = list(zip(batch.rows, batch.starts, batch.num_tokens, batch.write_from, strict=True))
        own = []
        for row, start, count, write_from in parts:
            own.append(self.kv_slots[row, max(start, write_from) : start + count])
            np.add.at(writers, own[-1], 1)
        assert writers.max(initial=0) <= 1, "two rows write one KV slot in one step"
        for (row, start, count, _), mine in zip(parts, own, strict=True):
            read = writers[self.kv_slots[row, : start + count]]
            assert read.sum() == len(mine), "a row reads KV that another writes in this step"

    def _check(self, batch: ScheduledBatch) -> None:
        """No slot is both source and destination; no slot is written twice in a phase."""
        sources = {op.source for op in batch.state_ops if op.kind is StateOpKind.COPY}
        targets = [op.destination for op in batch.state_ops]
        assert len(set(targets)) == len(targets), "two StateOps write one slot"
        assert not sources & set(targets), "a slot is source and destination"
        late = [s.slot for s in batch.saves] + batch.state_slots.tolist()
        assert len(set(late)) == len(late), "two writers of one state slot"
        assert 0 not in late, "a live row writes the sink"
        assert len(set(batch.rows.tolist())) == batch.num_rows, "a row appears twice"

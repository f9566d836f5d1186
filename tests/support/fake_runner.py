"""A data plane without a model: it finds faults of bookkeeping, exactly and in microseconds.

A KV slot holds the token written there; a state slot holds the hash of the tokens consumed. The
next token is computed only from the CONTENTS of the row's state slot and of every KV slot that
the row reads, never from the token list: a wrong slot, a state at the wrong depth, a freed slot
or a missing copy changes the output. Freed memory can be poisoned. StateOps of a step are done in
parallel: all sources are read before any destination is written.
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


def next_token(state: int, kv_tokens: np.ndarray, vocab_size: int) -> int:
    """What the model says after consuming ``kv_tokens`` (and being in ``state``)."""
    digest = xxhash.xxh3_64(int(state).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(kv_tokens, dtype=np.int64).tobytes())
    return digest.intdigest() % vocab_size


def reference_output(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The reply of a cold run: the oracle O1 for the fake model."""
    state, tokens, out = EMPTY, list(prompt), []
    for token in tokens:
        state = consume(state, token)
    for _ in range(count):
        token = next_token(state, np.array(tokens), vocab_size)
        out.append(token)
        tokens.append(token)
        state = consume(state, token)
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
        )

    def _source(self, op) -> int | None:
        return EMPTY if op.kind is StateOpKind.CLEAR else self.states[op.source]

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
            if position >= batch.write_from[i]:
                self.kv[kv_slot] = token
            state = consume(state, token)
            save = saves.pop((row, position + 1), None)
            if save is not None:
                written.append((save, state))
        written.append((slot, state))
        end = start + count
        slots = self.kv_slots[row, :end]
        assert len(np.unique(slots)) == end, "a row names one KV slot twice"
        token = next_token(state, self.kv[slots], self.config.vocab_size)
        if batch.samples[i]:
            self.tokens[row, end] = token
        return token

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

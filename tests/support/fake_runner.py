"""A data plane without a model: it finds faults of bookkeeping, exactly and in microseconds.

A state slot holds the hash of the tokens consumed; a KV slot holds that hash as it was at its
position (keys and values of deeper layers depend on the whole prefix, not on their token alone).
The next token is computed only from the CONTENTS of the row's state slot and of every KV slot that
the row reads, never from the token list: a wrong slot, a state at the wrong depth, a freed slot
or a missing copy changes the output. Freed memory can be poisoned. StateOps of a step are done in
parallel: all sources are read before any destination is written. Rows run in parallel too: no row
may read or write what another writes in the same step. A step runs when it is collected, not when
it is submitted: whatever the host did meanwhile must not be seen by it.

With drafts, each round of a row verifies a tree (``fake_drafts.py``): every node writes the slot of
its column and reads those of its own path alone; what is consumed follows from the contents as
ever. How the state is kept meanwhile: ``fake_states.py``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import xxhash

from hyradix.config import EngineConfig
from hyradix.request import (
    RowUpdate,
    SamplingParams,
    ScheduledBatch,
    StateOpKind,
    StepOutput,
    slot_order,
)
from tests.support.fake_drafts import GivenDrafts, RandomDrafts
from tests.support.fake_states import RowStates, consume

POISON = -777
EMPTY = 0


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
class Sampled:
    """What a row brought: its tokens, and the nodes that were consumed for them."""

    row: int
    tokens: list[int]
    path: list[int] = field(default_factory=lambda: [0])
    num_nodes: int = 1


@dataclass
class FakeRunner:
    """See the module's docstring. ``log`` keeps every batch, ``outputs`` what came of each."""

    config: EngineConfig
    seed: int = 0
    log: list[ScheduledBatch] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.config
        self.rng = Random(self.seed)
        self.kv = np.full(c.num_kv_slots + 1, POISON, dtype=np.int64)
        self.states: list[int | None] = [None] * (c.num_states + 1)
        self.tokens = np.full((c.max_requests, c.max_context + 1), POISON, dtype=np.int64)
        self.kv_slots = np.zeros((c.max_requests, c.table_width), dtype=np.int64)
        self.row_states = RowStates(c, self.rng)
        shape = c.spec.shape if c.spec is not None else None
        self.drafts: RandomDrafts | GivenDrafts = RandomDrafts(shape, self.rng)
        self._sampling: dict[int, SamplingParams] = {}
        self._stream: deque[ScheduledBatch | tuple[np.ndarray, list[int]]] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue a step; it runs when somebody collects it (as late as a device may)."""
        self.log.append(batch)
        self._check(batch)
        self._check_drafts(batch)
        self._stream.append(batch)

    def poison(self, kv_slots: np.ndarray, states: list[int]) -> None:
        """Spoil freed memory, in stream order: steps in flight may still read it, later not."""
        self._stream.append((kv_slots, states))

    def collect(self) -> StepOutput:
        """Run the stream up to the end of the oldest step."""
        while True:
            work = self._stream.popleft()
            if isinstance(work, ScheduledBatch):
                self.outputs.append(self._run(work))
                return self.outputs[-1]
            self.kv[work[0]] = POISON
            for slot in work[1]:
                self.states[slot] = None

    def kv_updates_in_flight(self) -> list[RowUpdate]:
        """Those of steps that were submitted and have not run."""
        steps = [work for work in self._stream if isinstance(work, ScheduledBatch)]
        return [update for step in steps for update in step.kv_updates]

    # ---- a step ----------------------------------------------------------------------------------

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        self._update(batch)
        self._check_rows(batch)
        values = [self._source(op) for op in batch.state_ops]
        for op, value in zip(batch.state_ops, values, strict=True):
            self.states[op.destination] = value
        saves = {(s.row, s.depth): s.slot for s in batch.saves}
        assert len(saves) == len(batch.saves), "two saves at one point"
        sampled: list[Sampled] = []
        written: list[tuple[int, int]] = []
        for i in range(batch.num_rows):
            self.row_states.name(int(batch.rows[i]), int(batch.state_slots[i]))
            forward = self._decode if batch.max_nodes[i] else self._prefill
            result = forward(batch, i, saves, written)
            if batch.samples[i]:
                self._write_tokens(result, int(batch.starts[i] + batch.num_tokens[i]))
                sampled.append(result)
        for slot, value in written:
            self.states[slot] = value
        assert not saves, f"saves at positions that were not computed: {saves}"
        for fold in batch.folds:
            self.states[fold.slot] = self.row_states.fold(fold, self._state(fold.slot))
        return _output(batch.step, sampled)

    def _update(self, batch: ScheduledBatch) -> None:
        for init in batch.row_inits:
            self.tokens[init.row] = POISON
            self.kv_slots[init.row] = 0
            self.row_states.enter(init.row)
            self._sampling[init.row] = init.sampling
        for table, updates in (
            (self.tokens, batch.token_updates),
            (self.kv_slots, batch.kv_updates),
        ):
            for update in updates:
                end = update.start + len(update.values)
                assert end <= table.shape[1], "an update past the table's width"
                table[update.row, update.start : end] = update.values

    def _write_tokens(self, result: Sampled, first: int) -> None:
        self.tokens[result.row, first : first + len(result.tokens)] = result.tokens

    def _source(self, op) -> int | None:
        if op.kind is StateOpKind.CLEAR:
            return EMPTY
        assert self.states[op.source] is not None, "a copy of a state that nobody wrote"
        return self.states[op.source]

    def _state(self, slot: int) -> int:
        state = self.states[slot]
        assert state is not None, "the working state was never written"
        return state

    def _prefill(self, batch: ScheduledBatch, i: int, saves: dict, written: list) -> Sampled:
        row, start, count = int(batch.rows[i]), int(batch.starts[i]), int(batch.num_tokens[i])
        slot = int(batch.state_slots[i])
        state = self._state(slot)
        self.row_states.prefill(row)
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
        return Sampled(row, [self._say(state, self.kv_slots[row, : start + count])])

    def _say(self, state: int, slots: np.ndarray) -> int:
        """The next token, from the contents of these slots, one per position."""
        assert (self.kv[slots] >= 0).all(), "a row reads KV that nobody wrote"
        return next_token(state, self.kv[slots], self.config.vocab_size)

    def _decode(self, batch: ScheduledBatch, i: int, saves: dict, written: list) -> Sampled:
        """A round: verify a tree (of one node where there are no drafts) and consume a path."""
        row, start, slot = int(batch.rows[i]), int(batch.starts[i]), int(batch.state_slots[i])
        most = int(batch.max_accepted[i])
        working, state = self.row_states.begin(
            row, self._state(slot), start, int(batch.committed[i]), most
        )
        parents, tokens, states = self._draft(batch, i, state)
        columns = self._scratch(batch, i)
        self.kv[columns] = POISON
        self.kv[columns[: len(tokens)]] = [kv_content(s) for s in states]
        path, sampled = self._judge(row, start, parents, tokens, states)
        assert len(path) <= most, "the fake proposer drafts deeper than it was told"
        for count, node in enumerate(path, 1):
            save = saves.pop((row, start + count), None)
            if save is not None:
                written.append((save, states[node]))
        for depth in range(start + len(path) + 1, start + most + 1):
            saves.pop((row, depth), None)  # not reached: nothing is written
        consumed = [tokens[node] for node in path]
        written.append((slot, self.row_states.end(row, working, states[path[-1]], consumed)))
        order = slot_order(np.array(path, np.int32), len(tokens))
        self.kv_slots[row, start : start + len(tokens)] = columns[order]
        return Sampled(row, sampled, path, len(tokens))

    def _draft(
        self, batch: ScheduledBatch, i: int, state: int
    ) -> tuple[tuple[int, ...], list[int], list[int]]:
        """Parents, tokens and states of the nodes to verify."""
        row, start = int(batch.rows[i]), int(batch.starts[i])
        root = int(self.tokens[row, start])
        assert root >= 0, "a token that nobody wrote"
        plan = self.drafts.draw(int(batch.max_nodes[i]), int(batch.max_accepted[i]))
        prefix = self.kv[self.kv_slots[row, :start]]

        def look(path: list[int]) -> int:
            at, seen = state, []
            for token in path:
                at = consume(at, token)
                seen.append(kv_content(at))
            return next_token(at, np.concatenate([prefix, seen]), self.config.vocab_size)

        tokens = plan.tokens(root, look, self.config.vocab_size, self.rng)
        states: list[int] = []
        for node, token in enumerate(tokens):
            above = states[plan.parents[node]] if node else state
            states.append(consume(above, token))
        return plan.parents, tokens, states

    def _scratch(self, batch: ScheduledBatch, i: int) -> np.ndarray:
        """The slots that this round may write, one per column from the root's on."""
        start, width = int(batch.starts[i]), self._num_written(batch, i)
        row = self.kv_slots[int(batch.rows[i]), : start + width]
        assert len(row) == start + width, "a draft node past the table's width"
        assert row.min() > 0, "a live row writes or reads the sink"
        assert len(np.unique(row)) == len(row), "a row names one KV slot twice"
        return row[start:].copy()

    def _judge(
        self, row: int, start: int, parents: tuple[int, ...], tokens: list[int], states: list[int]
    ) -> tuple[list[int], list[int]]:
        """Follow the child that is what its parent says; at times not past what ends a reply."""
        stops = self._stops(row) if self.rng.random() < 0.5 else frozenset()
        path, sampled = [0], []
        while True:
            columns = [*range(start), *(start + node for node in path)]
            token = self._say(states[path[-1]], self.kv_slots[row, columns])
            sampled.append(token)
            following = [
                node
                for node, parent in enumerate(parents)
                if parent == path[-1] and tokens[node] == token and token not in stops
            ]
            if not following:
                return path, sampled
            path.append(following[0])

    def _stops(self, row: int) -> frozenset[int]:
        sampling = self._sampling[row]
        eos = () if sampling.ignore_eos else self.config.eos_token_ids
        return frozenset(eos) | frozenset(sampling.stop_token_ids or ())

    # ---- checks ----------------------------------------------------------------------------------

    def _num_written(self, batch: ScheduledBatch, i: int) -> int:
        """Columns that row i of the batch may write."""
        spec = self.config.spec
        if batch.max_nodes[i] > 1:
            assert spec is not None, "drafts without a proposer"
            return spec.num_slots
        return int(batch.num_tokens[i])

    def _check_rows(self, batch: ScheduledBatch) -> None:
        """Rows run in parallel: what one writes, no other reads or writes in this step."""
        writers = np.zeros(len(self.kv), dtype=np.int64)
        parts = list(zip(batch.rows, batch.starts, batch.num_tokens, batch.write_from, strict=True))
        own = []
        for i, (row, start, _, write_from) in enumerate(parts):
            end = start + self._num_written(batch, i)
            own.append(self.kv_slots[row, max(start, write_from) : end])
            np.add.at(writers, own[-1], 1)
        assert writers.max(initial=0) <= 1, "two rows write one KV slot in one step"
        for (row, start, count, _), mine in zip(parts, own, strict=True):
            slots = self.kv_slots[row, : start + count]
            assert len(np.unique(slots)) == len(slots), "a row names one KV slot twice"
            read = writers[np.union1d(slots, mine)]
            assert read.sum() == len(mine), "a row reads KV that another writes in this step"

    def _check(self, batch: ScheduledBatch) -> None:
        """No slot is both source and destination; no slot is written twice in a phase."""
        sources = {op.source for op in batch.state_ops if op.kind is StateOpKind.COPY}
        targets = [op.destination for op in batch.state_ops]
        assert len(set(targets)) == len(targets), "two StateOps write one slot"
        assert not sources & set(targets), "a slot is source and destination"
        late = [s.slot for s in [*batch.saves, *batch.folds]] + batch.state_slots.tolist()
        assert len(set(late)) == len(late), "two writers of one state slot"
        assert 0 not in late, "a live row writes the sink"
        rows = [*batch.rows.tolist(), *(fold.row for fold in batch.folds)]
        assert len(set(rows)) == len(rows), "a row appears twice"

    def _check_drafts(self, batch: ScheduledBatch) -> None:
        """A row with drafts is in no other step; sizes and depths are what they must be."""
        drafting = set(batch.rows[batch.max_nodes > 1].tolist())
        named = {*batch.rows.tolist(), *(fold.row for fold in batch.folds)}
        for other in self._stream:
            if isinstance(other, ScheduledBatch):
                rows = set(other.rows.tolist())
                assert not rows & drafting, "drafts at a position that is not known yet"
                late = set(other.rows[other.max_nodes > 1].tolist())
                assert not late & named, "a step names a row whose drafts are in flight"
        assert (batch.committed <= batch.starts).all()
        for i in range(batch.num_rows):
            end = batch.starts[i] + self._num_written(batch, i)
            assert batch.num_slots[i] >= end, "a row writes columns that are not its own"
        assert ((batch.max_accepted > 1) == (batch.max_nodes > 1)).all()
        assert (batch.max_accepted >= 1).all()
        assert (batch.num_tokens[batch.max_nodes > 0] == 1).all()
        ends = batch.starts + np.maximum(batch.num_tokens, batch.max_accepted)
        reach = dict(zip(batch.rows.tolist(), zip(batch.starts, ends, strict=True), strict=True))
        for save in batch.saves:
            start, end = reach[save.row]
            assert start < save.depth <= end, "a save that this step cannot reach"


def _output(step: int, sampled: list[Sampled]) -> StepOutput:
    """Padded with -1."""
    width = max((len(s.tokens) for s in sampled), default=1)
    tokens = np.full((len(sampled), width), -1, dtype=np.int32)
    paths = np.full((len(sampled), width), -1, dtype=np.int32)
    for at, result in enumerate(sampled):
        tokens[at, : len(result.tokens)] = result.tokens
        paths[at, : len(result.path)] = result.path
    return StepOutput(
        step=step,
        rows=np.array([s.row for s in sampled], dtype=np.int32),
        token_ids=tokens,
        num_tokens=np.array([len(s.tokens) for s in sampled], dtype=np.int32),
        is_faulty=np.zeros(len(sampled), dtype=np.bool_),
        paths=paths,
        num_nodes=np.array([s.num_nodes for s in sampled], dtype=np.int32),
    )

"""Before the first request: compiling every kernel, and measuring what rounds of drafts cost.

Owns: made-up steps on rows that nobody has yet. Does not know: requests, the scheduler.
Invariant: afterwards no row, state slot or log holds anything of it; KV slots are free anyway.
Read next: ``runner.py``, ``scheduler/draft_choice.py`` (what the costs are for).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from hyradix.kernels.ops import Array
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.layers.context import ForwardContext
from hyradix.models.decoder import Decoder
from hyradix.request import SINK, Int32Array, ScheduledBatch
from hyradix.runner.batch import PreparedBatch, TreeRows, prepare
from hyradix.runner.speculation import Speculation
from hyradix.spec_config import RoundCosts
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound

CONTEXT = 64
"""Tokens that a made-up row has consumed, where the context has room for them and two more."""
CHAIN = 8
"""Nodes of the larger trees that are timed, where the shape has so many."""
REPEATS = 5
LEAST_TREE = 0.001
"""Of a plain step, what the larger trees take more than the small ones at least: two times that
differ by less than their noise must not make nodes free (the choice divides by what they take)."""


class Rehearsal:
    """Steps of ``num_rows`` decodes on the state pool's sink.

    KV: of the sink too, or, with ``has_slots``, spread over the pool as real rows' would be.
    """

    def __init__(self, speculation: Speculation, num_rows: int, *, has_slots: bool = False) -> None:
        self._has_slots = has_slots
        self._parts = speculation
        self._model: Decoder = speculation.model
        self.num_rows = num_rows
        rows = np.arange(num_rows, dtype=np.int32)
        ones = np.ones(num_rows, np.int32)
        self._context_length = min(CONTEXT, speculation.config.max_context - 2)
        starts = ones * self._context_length
        self._batch = ScheduledBatch(
            step=-1,
            rows=rows,
            starts=starts,
            num_tokens=ones,
            write_from=starts,
            state_slots=ones * SINK,
            samples=np.ones(num_rows, np.bool_),
            max_nodes=ones,
            max_accepted=ones,
            committed=starts,
            num_slots=starts + np.int32(1),
            is_followed=np.ones(num_rows, np.bool_),
        )
        self._tables = speculation.table
        self._saved = self._tables.kv_slots[:0]
        self._pool_size = speculation.pools.kv.k.shape[1] - 1

    def __enter__(self) -> Rehearsal:
        self._parts.pools.states.clear_sink()
        self._saved = self._tables.kv_slots[: self.num_rows].copy()
        self._tables.kv_slots[: self.num_rows] = SINK
        if not self._has_slots:
            return self
        columns = self._context_length + self._num_columns()
        width = min(self._tables.kv_slots.shape[1], columns)
        slots = 1 + np.arange(self.num_rows * width, dtype=np.int32) % self._pool_size
        self._tables.kv_slots[: self.num_rows, :width] = slots.reshape(self.num_rows, width)
        return self

    def __exit__(self, *_: object) -> None:
        self._tables.kv_slots[: self.num_rows] = self._saved
        for row in range(self.num_rows):
            if self._parts.keeper is not None:
                self._parts.keeper.enter(row)
            if self._parts.proposer is not None:
                self._parts.proposer.enter(row, 0, None)

    def _num_columns(self) -> int:
        spec = self._parts.config.spec
        return 2 + (spec.num_slots if spec is not None else 0)

    # ---- parts of a round -----------------------------------------------------------------------

    def step(self, run: Callable[[ForwardContext, Int32Array], Array]) -> Array:
        """A plain decode step, its tokens chosen."""
        prepared = prepare(self._batch, self._tables)
        return self._finish(run(self._context(prepared), prepared.token_ids))

    def verify(self, num_nodes: int, run: Callable[[ForwardContext, Int32Array], Array]) -> None:
        """A chain of ``num_nodes`` for every row, its root consumed."""
        parts, batch = self._parts, self._batch
        assert parts.keeper is not None
        for row in batch.rows.tolist():
            parts.keeper.enter(row)
        parts.keeper.begin(batch.rows, batch.state_slots, batch.starts, batch.committed)
        parents = np.tile(np.arange(-1, num_nodes - 1, dtype=np.int32), self.num_rows)
        cu_nodes = np.arange(self.num_rows + 1, dtype=np.int32) * np.int32(num_nodes)
        trees = FlatTrees.of(cu_nodes, parents)
        verified = TreeRows(batch.rows, trees, np.zeros(len(parents), np.int32))
        prepared = prepare(batch, self._tables, verified)
        arranged = parts.arrange(batch, prepared, verified)
        context = replace(self._context(prepared), trees=arranged, spec=parts.spec_layers)
        hidden = self._finish(run(context, prepared.token_ids))
        paths = [np.zeros(1, np.int32)] * self.num_rows
        normed = self._model.normalize(hidden) if parts.uses_hidden else None
        parts.keeper.keep(arranged, batch.starts, paths, (), normed)

    def learn(self) -> None:
        """The proposer hears of one token of every row."""
        parts, batch = self._parts, self._batch
        if parts.proposer is None:
            return
        hidden = None
        if parts.uses_hidden:
            size = self._model.config.hidden_size
            ops = self._model.ops
            hidden = ops.view(torch.zeros(self.num_rows, size, device=ops.device, dtype=ops.dtype))
        ends = batch.starts + np.int32(1)
        next_slots = self._tables.kv_slots[batch.rows, ends]
        parts.proposer.learn(
            ConsumedTokens(batch.rows, batch.starts, ends, batch.write_from, next_slots, hidden)
        )

    def propose(self, num_steps: int) -> Drafts | None:
        """Chains of ``num_steps`` drafts for every row."""
        parts, batch = self._parts, self._batch
        if parts.proposer is None:
            return None
        ones = np.ones(self.num_rows, np.int32)
        assert parts.config.spec is not None
        shape = replace(parts.config.spec.shape, topk=1, steps=num_steps, nodes=num_steps + 1)
        return parts.proposer.propose(
            DraftRound(
                rows=batch.rows,
                starts=batch.starts + np.int32(1),
                max_nodes=ones * (num_steps + 1),
                max_depth=ones * num_steps,
                shape=shape,
            )
        )

    def _context(self, prepared: PreparedBatch) -> ForwardContext:
        return ForwardContext(prepared.states, prepared.queries, self._parts.pools.memory)

    def _finish(self, hidden: Array) -> Array:
        self._model.logits(hidden).argmax(dim=-1).cpu()  # a device has then done all of it
        return hidden


@torch.inference_mode()
def compile_kernels(speculation: Speculation) -> None:
    """Run each kernel as often as the backend asks for."""
    model = speculation.model

    def one_of_each(context: ForwardContext, token_ids: Int32Array) -> Array:
        return model.warm_up(context)

    def everything() -> None:
        with Rehearsal(speculation, 1) as rehearsal:
            rehearsal.step(one_of_each)
            if speculation.keeper is not None:
                spec = speculation.config.spec
                rehearsal.verify(min(2, spec.shape.nodes) if spec else 1, one_of_each)
                rehearsal.verify(1, one_of_each)
            if speculation.proposer is not None:
                speculation.proposer.warm_up()

    model.ops.warm_up(everything)


@torch.inference_mode()
def measure_costs(speculation: Speculation) -> RoundCosts:
    """Seconds of the parts of a round for several numbers of rows. Takes about a second."""
    config, forward = speculation.config, speculation.model.forward
    assert config.spec is not None
    nodes = min(CHAIN, config.spec.shape.nodes)
    sizes = sorted({n for n in (1, 2, 4, 8, 16, 32) if n < config.max_requests} | {1})
    sizes.append(min(64, config.max_requests))

    def run(context: ForwardContext, token_ids: Int32Array) -> Array:
        return forward(token_ids, context)

    seconds = partial(_seconds, device=speculation.model.ops.device)
    found = []
    for size in sorted(set(sizes)):
        with Rehearsal(speculation, size, has_slots=True) as r:
            plain = seconds(partial(r.step, run))
            short, long = (seconds(partial(r.verify, count, run)) for count in (2, nodes))
            learn = seconds(r.learn)
            one, three = (seconds(partial(r.propose, steps)) for steps in (1, 3))
        node = max(long - short, LEAST_TREE * plain) / (size * max(nodes - 2, 1))
        draft = max(three - one, 0.0) / 2
        beside = short + learn + one - plain - node * size - draft
        found.append((size, plain, node, draft, max(beside, 0.0)))
    columns = list(zip(*found, strict=True))
    return RoundCosts(
        rows=columns[0], plain=columns[1], node=columns[2], draft=columns[3], round=columns[4]
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)

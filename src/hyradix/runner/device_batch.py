"""One ``ScheduledBatch`` as the numbers that a device needs, decided before anything is launched.

Owns: the order of rows (prefill first, then decodes), the arrays that are sent, by name.
Does not know: tensors, launches, what a model computes.

Invariants:
- Host tables and the log's counts are moved on here, once a step, in the order of steps.
- A step of decodes alone needs nothing but the fixed columns (``decode_form.py``); saves, folds and
  updates come beside them.
- Cost: numpy over rows; Python only over what changes rarely (updates, saves, prefill rows).
Read next: ``device_runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hyradix.kernels.attention.triton import query_blocks
from hyradix.kernels.attention.triton_gather import key_layout
from hyradix.kernels.gated_delta_rule.triton import chunk_table
from hyradix.request import (
    BoolArray,
    Int32Array,
    Int64Array,
    ScheduledBatch,
    StateOp,
    StateOpKind,
)
from hyradix.runner.batch import order_saves
from hyradix.runner.decode_form import DecodeForm
from hyradix.runner.device_log import DeviceLog
from hyradix.runner.device_tables import DeviceTables, entries_of
from hyradix.runner.request_table import RequestTable

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step is, N rows and T tokens.

    order: ``int32[N]`` the batch's rows as the step has them. cu_tokens: ``int32[N+1]``.
    num_prefill, num_prefill_tokens: what stands before the decodes. sampling: ``int64[M]`` numbers
    in ``order`` of the rows that sample. positions: ``int64[M]`` that the new tokens will have.
    arrays: what is sent beside the fixed columns.
    """

    batch: ScheduledBatch
    order: Int32Array
    cu_tokens: Int32Array
    num_prefill: int
    sampling: Int64Array
    positions: Int64Array
    arrays: dict[str, Numbers] = field(default_factory=dict)

    @property
    def num_plain(self) -> int:
        """Rows whose tokens may be of a prompt (as ``PreparedBatch``)."""
        return self.num_prefill

    @property
    def num_decodes(self) -> int:
        """Rows that decode."""
        return len(self.order) - self.num_prefill

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the rows that do not."""
        return int(self.cu_tokens[self.num_prefill])

    @property
    def prefill_counts(self) -> Int32Array:
        """Tokens of each of them."""
        counts: Int32Array = np.diff(self.cu_tokens[: self.num_prefill + 1])
        return counts

    @property
    def num_prefill_keys(self) -> Int32Array:
        """Keys that each of them sees, its own included."""
        ends: Int32Array = self.batch.starts[self.order[: self.num_prefill]] + self.prefill_counts
        return ends

    @property
    def num_prefill_sampling(self) -> int:
        """How many of them are sampled from."""
        return int(np.searchsorted(self.sampling, self.num_prefill))

    @property
    def decode_sampling(self) -> Int64Array:
        """Numbers, among the rows that decode, of those that are sampled from."""
        return self.sampling[self.num_prefill_sampling :] - self.num_prefill

    @property
    def prefill_alone(self) -> StepPlan:
        """The same step without the rows that decode, with arrays of its own."""
        count, num_sampling = self.num_prefill, self.num_prefill_sampling
        return StepPlan(
            self.batch,
            self.order[:count],
            self.cu_tokens[: count + 1],
            count,
            self.sampling[:num_sampling],
            self.positions[:num_sampling],
        )

    @property
    def sampling_rows(self) -> Int32Array:
        """``int32[M]`` request rows."""
        rows: Int32Array = self.batch.rows[self.order[self.sampling]]
        return rows


class Planner:
    """Makes the plans; ``log`` None: decode in place."""

    def __init__(
        self, table: RequestTable, tables: DeviceTables, form: DecodeForm, log: DeviceLog | None
    ) -> None:
        self._table = table
        self._tables = tables
        self._form = form
        self._log = log

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        """Take in the batch's updates and lay out its rows."""
        arrays: dict[str, Numbers] = {}
        self._table.apply(batch)
        self._updates(batch, arrays)
        if batch.state_ops:
            arrays["op_sources"], arrays["op_targets"] = slot_moves(batch.state_ops)
        if self._log is not None:
            self._log.enter(batch.row_inits)
        is_decode = batch.max_nodes > 0
        num_prefill = batch.num_rows - int(is_decode.sum())
        order = np.arange(batch.num_rows, dtype=np.int32)
        if num_prefill:
            order = np.concatenate([np.flatnonzero(~is_decode), np.flatnonzero(is_decode)])
            order = order.astype(np.int32)
        counts = batch.num_tokens[order]
        cu_tokens = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=cu_tokens[1:])
        samples = batch.samples[order]
        sampling = np.flatnonzero(samples)
        ends = batch.starts[order].astype(np.int64) + counts
        plan = StepPlan(batch, order, cu_tokens, num_prefill, sampling, ends[sampling], arrays)
        self._decodes(plan, order[num_prefill:], samples[num_prefill:])
        if batch.folds:
            assert self._log is not None, "nothing is deferred, so nothing is folded"
            self._log.plan_folds(batch.folds, arrays)
        return plan

    def _updates(self, batch: ScheduledBatch, arrays: dict[str, Numbers]) -> None:
        table, tables = self._table, self._tables
        width = tables.kv_slots.shape[1]
        for name, entries in (
            ("token", entries_of(batch.token_updates, table.token_ids, tables.width)),
            ("kv", entries_of(batch.kv_updates, table.kv_slots, width)),
        ):
            if entries is not None:
                arrays[f"{name}_places"], arrays[f"{name}_values"] = entries

    def _decodes(self, plan: StepPlan, index: Int32Array, samples: BoolArray) -> None:
        """The fixed columns, and what the rows' saves need."""
        batch, tables = plan.batch, self._tables
        if not len(index):
            self._form.clear()
            return
        rows, starts, slots = batch.rows[index], batch.starts[index], batch.state_slots[index]
        num_log_rows = np.zeros(len(index), np.int32)
        if self._log is not None:
            num_log_rows = self._log.plan(
                rows, slots, starts, batch.committed[index], batch.saves, plan.arrays
            )
        elif batch.saves:
            self._copies(plan, rows, slots)
        at = tables.token_at(rows, starts)
        next_at = np.where(samples, at + 1, tables.sink_at + 1)
        self._form.fill(
            rows, starts, self._table.kv_slots[rows, starts], slots, num_log_rows, at, next_at
        )

    def _copies(self, plan: StepPlan, rows: Int32Array, slots: Int32Array) -> None:
        """Decode in place: what is saved is the working state behind the forward."""
        index = {row: i for i, row in enumerate(rows.tolist())}
        found = [(slots[index[s.row]], s.slot) for s in plan.batch.saves if s.row in index]
        if found:
            sources, targets = np.array(found, np.int32).T.copy()
            plan.arrays.update(copy_sources=sources, copy_targets=targets)

    # ---- steps with prefill ---------------------------------------------------------------------

    def lay_out(self, plan: StepPlan) -> None:
        """Put what a step that is no padded decode needs of all its tokens into ``plan.arrays``."""
        batch, order, cu = plan.batch, plan.order, plan.cu_tokens
        rows, starts, counts = batch.rows[order], batch.starts[order], np.diff(cu)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(cu[-1], dtype=np.int32) + np.repeat(starts - cu[:-1], counts)
        is_written = positions >= np.repeat(batch.write_from[order], counts)
        kv_slots = self._table.kv_slots[token_rows, positions]
        ends = (starts + counts)[plan.sampling]
        sampled = rows[plan.sampling]
        plan.arrays.update(
            positions=positions.astype(np.int32),
            write_slots=np.where(is_written, kv_slots, np.int32(0)),
            token_at=self._tables.token_at(token_rows, positions),
            last=cu[1:][plan.sampling] - np.int32(1),
            last_rows=sampled,
            last_positions=ends - np.int32(1),
            next_at=self._tables.token_at(sampled, ends),
        )

    def lay_out_prefill(self, plan: StepPlan, tokens_per_block: int, *, gathers_keys: bool) -> None:
        """The same of its rows that prefill: arguments of ``DeviceStates``, ``DeviceQueries`` and
        ``DeviceKeys``.

        tokens_per_block: of attention. gathers_keys: it reads them from one place.
        """
        number = plan.num_prefill
        index, cu_seqlens = plan.order[:number], plan.cu_tokens[: number + 1].copy()
        rows, starts, counts = plan.batch.rows[index], plan.batch.starts[index], np.diff(cu_seqlens)
        assert (counts > 0).all(), "a sequence without tokens"
        offsets, save_at, save_slots = order_saves(plan.batch.saves, rows, starts, counts)
        table, chunk_offsets = chunk_table(cu_seqlens, offsets, save_at, save_slots)
        plan.arrays.update(
            seq_cu=cu_seqlens,
            seq_rows=rows,
            seq_starts=starts,
            seq_blocks=query_blocks(cu_seqlens, starts, tokens_per_block),
            seq_of=np.repeat(np.arange(number, dtype=np.int32), counts),
            seq_save_offsets=offsets,
            seq_save_at=save_at,
            seq_save_slots=save_slots,
            seq_chunks=table,
            seq_chunk_offsets=chunk_offsets,
            seq_slots=plan.batch.state_slots[index].astype(np.int32),
        )
        if gathers_keys:
            blocks, key_offsets = key_layout(starts + counts)
            plan.arrays.update(key_blocks=blocks, key_offsets=key_offsets)


def slot_moves(ops: tuple[StateOp, ...]) -> tuple[Int32Array, Int32Array]:
    """Sources (-1: clear) and targets, ``int32[J]``, of one step's clears and copies."""
    sources = [-1 if op.kind == StateOpKind.CLEAR else op.source for op in ops]
    targets = [op.destination for op in ops]
    return np.array(sources, np.int32), np.array(targets, np.int32)

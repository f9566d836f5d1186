"""Collects what one step does and freezes it into a ``ScheduledBatch``.

Owns: the order of rows and effects inside a batch. Does not know: why they were chosen.
Invariant: a request appears at most once in a batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hyradix.request import (
    RowInit,
    RowUpdate,
    ScheduledBatch,
    StateFold,
    StateOp,
    StateSave,
)
from hyradix.scheduler.request_state import RequestState

_COLUMNS = (
    "rows", "starts", "num_tokens", "write_from", "state_slots", "samples",
    "max_nodes", "max_accepted", "committed", "num_slots", "is_followed",
)  # fmt: skip
_FLAGS = frozenset({"samples", "is_followed"})
_ROW = struct.Struct(f"={len(_COLUMNS)}i")


class PlannedRow(msgspec.Struct, frozen=True, gc=False):
    """One request's part in a step, kept until the step is committed.

    A struct and no dataclass, and nothing that refers to it: one is made for every row of every
    step, and the garbage collector need not look at it.
    """

    state: RequestState
    row: int
    start: int
    num_tokens: int
    samples: bool
    is_prefill: bool
    max_nodes: int = 0
    """Nodes of a draft tree, its root included; 1: a decode without drafts; 0: a prefill."""
    max_accepted: int = 1
    """Positions that may be consumed at most, where there are drafts."""

    @property
    def end(self) -> int:
        """Position after the last one that is computed whatever is accepted."""
        return self.start + self.num_tokens

    @property
    def furthest(self) -> int:
        """Position after the last one that can be consumed."""
        return self.start + max(self.num_tokens, self.max_accepted)

    @property
    def has_drafts(self) -> bool:
        """Whether the data plane may draft here."""
        return self.max_nodes > 1


@dataclass(slots=True)
class BatchBuilder:
    """Filled by the scheduler, read once by ``build``."""

    step: int
    planned: list[PlannedRow] = field(default_factory=list)
    columns: bytearray = field(default_factory=bytearray)
    """What the batch says of each row, in the order of ``_COLUMNS``, int32 each."""
    num_prefill_tokens: int = 0
    """Prompt tokens scheduled so far."""
    folded: list[RequestState] = field(default_factory=list)
    """Whose state each of ``folds`` is."""
    row_inits: list[RowInit] = field(default_factory=list)
    token_updates: list[RowUpdate] = field(default_factory=list)
    kv_updates: list[RowUpdate] = field(default_factory=list)
    state_ops: list[StateOp] = field(default_factory=list)
    saves: list[StateSave] = field(default_factory=list)
    folds: list[StateFold] = field(default_factory=list)
    draft_topk: int = 0

    def add_row(self, planned: PlannedRow, *, write_from: int, state_slot: int) -> None:
        """Schedule one request, whose own slots for this step are allocated already."""
        state = planned.state
        assert state.holding is not None
        self.planned.append(planned)
        if planned.is_prefill:
            self.num_prefill_tokens += planned.num_tokens
        self.columns += _ROW.pack(
            planned.row, planned.start, planned.num_tokens, write_from, state_slot,
            planned.samples, planned.max_nodes, planned.max_accepted,
            state.num_computed_tokens, state.holding.num_slots, state.is_followed,
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to submit."""
        return not self.planned and not self.folds

    def build(self) -> ScheduledBatch:
        """The frozen batch."""
        return ScheduledBatch(
            step=self.step,
            **self._columns(),
            row_inits=tuple(self.row_inits),
            token_updates=tuple(self.token_updates),
            kv_updates=tuple(self.kv_updates),
            state_ops=tuple(self.state_ops),
            saves=tuple(self.saves),
            folds=tuple(self.folds),
            draft_topk=self.draft_topk,
        )

    def _columns(self) -> dict[str, Any]:
        """The batch's arrays: one conversion for all of them."""
        whole = np.frombuffer(self.columns, np.int32).reshape(-1, len(_COLUMNS)).T.copy()
        return {
            name: column.astype(np.bool_) if name in _FLAGS else column
            for name, column in zip(_COLUMNS, whole, strict=True)
        }

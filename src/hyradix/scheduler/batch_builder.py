"""Collects what one step does and freezes it into a ``ScheduledBatch``.

Owns: the order of rows and effects inside a batch. Does not know: why they were chosen.
Invariant: a request appears at most once in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One request's part in a step, kept until the step is committed."""

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
    folded: list[RequestState] = field(default_factory=list)
    """Whose state each of ``folds`` is."""
    write_from: list[int] = field(default_factory=list)
    state_slots: list[int] = field(default_factory=list)
    row_inits: list[RowInit] = field(default_factory=list)
    token_updates: list[RowUpdate] = field(default_factory=list)
    kv_updates: list[RowUpdate] = field(default_factory=list)
    state_ops: list[StateOp] = field(default_factory=list)
    saves: list[StateSave] = field(default_factory=list)
    folds: list[StateFold] = field(default_factory=list)
    draft_topk: int = 0

    def add_row(self, planned: PlannedRow, *, write_from: int, state_slot: int) -> None:
        """Schedule one request."""
        self.planned.append(planned)
        self.write_from.append(write_from)
        self.state_slots.append(state_slot)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to submit."""
        return not self.planned and not self.folds

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens scheduled so far."""
        return sum(p.num_tokens for p in self.planned if p.is_prefill)

    def build(self) -> ScheduledBatch:
        """The frozen batch."""
        return ScheduledBatch(
            step=self.step,
            rows=np.array([p.row for p in self.planned], dtype=np.int32),
            starts=np.array([p.start for p in self.planned], dtype=np.int32),
            num_tokens=np.array([p.num_tokens for p in self.planned], dtype=np.int32),
            write_from=np.array(self.write_from, dtype=np.int32),
            state_slots=np.array(self.state_slots, dtype=np.int32),
            samples=np.array([p.samples for p in self.planned], dtype=np.bool_),
            max_nodes=np.array([p.max_nodes for p in self.planned], dtype=np.int32),
            max_accepted=np.array([p.max_accepted for p in self.planned], dtype=np.int32),
            committed=np.array([p.state.num_computed_tokens for p in self.planned], dtype=np.int32),
            num_slots=np.array([_num_slots(p.state) for p in self.planned], dtype=np.int32),
            is_followed=np.array([p.state.is_followed for p in self.planned], dtype=np.bool_),
            row_inits=tuple(self.row_inits),
            token_updates=tuple(self.token_updates),
            kv_updates=tuple(self.kv_updates),
            state_ops=tuple(self.state_ops),
            saves=tuple(self.saves),
            folds=tuple(self.folds),
            draft_topk=self.draft_topk,
        )


def _num_slots(state: RequestState) -> int:
    assert state.holding is not None
    return state.holding.num_slots

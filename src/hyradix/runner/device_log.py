"""The state log of plain decode on a device: every fold is decided and sent before it is due.

Owns: the draft buffers of roots, the arrays of a step's folds and moved rows.
Does not know: staging, when a step runs.

Invariants:
- Counts move on when a step is planned, and every launch follows in that order on one stream: each
  decode row appends exactly one row a step, so the host is never behind the device.
- Folds of one launch have different targets; a fold into a track leaves its base alone.
Source: DESIGN section 6.1. Read next: ``spec_decode/log_counts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.state_slots.triton import Registry, move_rows_
from hyradix.kernels.tree_recurrence.keeping import StateArrays
from hyradix.kernels.tree_recurrence.ragged import window_taps
from hyradix.kernels.tree_recurrence.rules import RULES
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array, RowInit, StateFold, StateSave
from hyradix.runner.pools import StatePool
from hyradix.spec_decode.draft_buffers import DraftBuffers, StatePoolTensors
from hyradix.spec_decode.log_counts import Folding, LogCounts
from hyradix.state_bytes import SpecShape

Arrays = dict[str, Int32Array]
OnDevice = Mapping[str, torch.Tensor]
ROOM, SAVES, LAST = "room", "saves", "last"
"""Prefixes of the folds' arrays: before the forward, behind it, and of rows at rest."""


class DeviceLog:
    """For an engine without drafts whose ``num_log_rows`` is not 0."""

    def __init__(self, model: Decoder, config: EngineConfig, states: StatePool) -> None:
        self._ops = model.ops
        self._rule = next(rule for rule in RULES if rule.name == model.config.recurrence)
        shape = model.config.recurrent_shape(model.ops.dtype.itemsize)
        spec = SpecShape(
            num_requests=config.max_requests, num_nodes=1, num_log_rows=config.num_log_rows
        )
        pool = StatePoolTensors(states.recurrent, states.conv, None)
        self.buffers = DraftBuffers("log", model.ops, shape, spec, pool)
        assert self.buffers.num_bytes == config.draft_bytes, "draft bytes were computed wrongly"
        self._arrays: StateArrays = self.buffers.arrays
        arrays = self._arrays
        self._rows = Registry(
            [arrays.k, arrays.u, arrays.g, arrays.conv], [0, 0, 0, self.buffers.first_row]
        )
        self._counts = LogCounts(config.max_requests, config.num_log_rows)

    @property
    def layers(self) -> tuple[SpecLayer, ...]:
        """What recurrent layers take."""
        return self.buffers.layers

    # ---- planning -------------------------------------------------------------------------------

    def enter(self, inits: tuple[RowInit, ...]) -> None:
        """Requests enter rows: what was logged there is void."""
        for init in inits:
            self._counts.enter(init.row)

    def plan(
        self,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
        committed: Int32Array,
        saves: tuple[StateSave, ...],
        arrays: Arrays,
    ) -> Int32Array:
        """One more token of each row: its valid log rows; what has to move goes into ``arrays``."""
        due = self._counts.make_room(rows, slots, starts, committed)
        if due is not None:
            arrays |= self._moves(ROOM, due.rows, due.slots, due.slots, due.counts)
            arrays |= _kept_rows(due)
        num_log_rows = self._counts.arrange(rows, starts)
        self._counts.append(rows, np.ones(len(rows), np.int32))
        index = {row: i for i, row in enumerate(rows.tolist())} if saves else {}
        reached = [(index[save.row], save.slot) for save in saves if save.row in index]
        if reached:
            at, targets = np.array(reached, np.int32).T.copy()
            counts = num_log_rows[at] + np.int32(1)
            arrays |= self._moves(SAVES, rows[at], slots[at], targets, counts)
        return num_log_rows

    def plan_folds(self, folds: tuple[StateFold, ...], arrays: Arrays) -> None:
        """The last folds of rows that have come to rest."""
        due = self._counts.fold(folds)
        if len(due):
            arrays |= self._moves(LAST, due.rows, due.slots, due.slots, due.counts)

    def _moves(
        self,
        name: str,
        rows: Int32Array,
        sources: Int32Array,
        targets: Int32Array,
        counts: Int32Array,
    ) -> Arrays:
        taps = window_taps(counts, width=self.buffers.width, first_row=self.buffers.first_row)
        columns = (sources, targets, rows + np.int32(1), counts, taps)
        return {f"{name}{i}": column for i, column in enumerate(columns)}

    # ---- launches -------------------------------------------------------------------------------

    def fold(self, name: str, sent: OnDevice) -> None:
        """The folds of that name, if any; behind ``ROOM`` the rows that stay move to the front."""
        if f"{name}0" not in sent:
            return
        moves = DeviceMoves(*(sent[f"{name}{i}"] for i in range(5)))
        self._ops.fold(self._rule, self._arrays, moves)  # type: ignore[arg-type]  # Triton's form
        if name == ROOM and "kept0" in sent:
            move_rows_(self._rows, *(sent[f"kept{i}"] for i in range(4)))

    def rehearse(self) -> None:
        """Every launch on padding, which moves nothing."""
        zeros = torch.zeros(1, 1, dtype=torch.int32, device=self._ops.device)
        taps = zeros.expand(1, self.buffers.width - 1).contiguous()
        columns = {f"{ROOM}{i}": zeros[0] for i in range(4)} | {f"{ROOM}4": taps}
        kept = (zeros[0], zeros, zeros[0], zeros[0])
        self.fold(ROOM, columns | {f"kept{i}": column for i, column in enumerate(kept)})


def _kept_rows(due: Folding) -> Arrays:
    """Arguments of ``move_rows_`` for what stays behind each fold."""
    index = np.flatnonzero(due.left)
    if not len(index):
        return {}
    left = due.left[index]
    sources = due.counts[index, None] + np.arange(left.max(), dtype=np.int32)
    columns = (due.rows[index] + np.int32(1), sources, np.zeros_like(left), left)
    return {f"kept{i}": column for i, column in enumerate(columns)}

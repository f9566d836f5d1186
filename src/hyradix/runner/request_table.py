"""The data plane's copy of the request table: what each row's tokens are and where their KV is.

Owns: token ids, KV slots and sampling parameters by row. Does not know: why a row changed.
Invariant: rows change only through the updates of a ``ScheduledBatch`` and by sampled tokens.
Read next: ``batch.py``.
"""

from __future__ import annotations

import numpy as np

from hyradix.config import EngineConfig
from hyradix.request import Int32Array, RowInit, ScheduledBatch


class RequestTable:
    """token_ids, kv_slots: ``int32[max_requests, max_context]``; untouched rows cost no memory."""

    def __init__(self, config: EngineConfig) -> None:
        shape = (config.max_requests, config.max_context)
        self.token_ids: Int32Array = np.zeros(shape, np.int32)
        self.kv_slots: Int32Array = np.zeros(shape, np.int32)
        self._inits: list[RowInit | None] = [None] * config.max_requests

    def apply(self, batch: ScheduledBatch) -> None:
        """Enter new rows and write the batch's token and KV updates."""
        for init in batch.row_inits:
            self._inits[init.row] = init
        for update in batch.token_updates:
            end = update.start + len(update.values)
            self.token_ids[update.row, update.start : end] = update.values
        for update in batch.kv_updates:
            end = update.start + len(update.values)
            self.kv_slots[update.row, update.start : end] = update.values

    def init_of(self, row: int) -> RowInit | None:
        """How the row was entered."""
        return self._inits[row]

    def write_sampled(self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Put sampled tokens where they will be consumed; those past the table end are dropped."""
        fits = positions < self.token_ids.shape[1]
        self.token_ids[rows[fits], positions[fits]] = token_ids[fits]

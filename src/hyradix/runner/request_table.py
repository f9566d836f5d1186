"""The data plane's copy of the request table: what each row's tokens are and where their KV is.

Owns: token ids, KV slots and sampling parameters by row. Does not know: why a row changed.
Invariant: rows change only through the updates of a ``ScheduledBatch`` and by sampled tokens.
Read next: ``batch.py``.
"""

from __future__ import annotations

import numpy as np

from hyradix.config import EngineConfig
from hyradix.request import Int32Array, Int64Array, RowInit, ScheduledBatch, slot_order


class RequestTable:
    """token_ids ``int32[max_requests, max_context]``, kv_slots ``int32[.., table_width]``.

    Rows that were never touched cost no memory. Columns of ``kv_slots`` past a row's tokens may
    hold the slots of draft nodes.
    """

    def __init__(self, config: EngineConfig) -> None:
        num_rows = config.max_requests
        self.token_ids: Int32Array = np.zeros((num_rows, config.max_context), np.int32)
        self.kv_slots: Int32Array = np.zeros((num_rows, config.table_width), np.int32)
        self._inits: list[RowInit | None] = [None] * num_rows

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

    def write_sampled(self, row: int, position: int, token_ids: list[int]) -> None:
        """Put sampled tokens where they will be consumed; those past the table end are dropped."""
        end = min(position + len(token_ids), self.token_ids.shape[1])
        self.token_ids[row, position:end] = token_ids[: end - position]

    def write_next(self, rows: Int32Array, positions: Int64Array, token_ids: Int32Array) -> None:
        """As ``write_sampled``, one token for each of several rows."""
        fits = positions < self.token_ids.shape[1]
        self.token_ids[rows[fits], positions[fits]] = token_ids[fits]

    def reorder(self, row: int, start: int, path: Int32Array, num_nodes: int) -> None:
        """Nodes at columns start.. were verified and ``path`` consumed: see ``slot_order``."""
        columns = self.kv_slots[row, start : start + num_nodes]
        columns[:] = columns[slot_order(path, num_nodes)]

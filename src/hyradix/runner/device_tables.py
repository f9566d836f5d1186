"""The device's copy of the request table: token ids and KV slots by row and position.

Owns: both tables, the sink row behind the last request's, the flat places of their entries.
Does not know: why an entry changes.

Invariants:
- A row's tokens past what the host told are written by the device alone, in the order of steps.
- The token table has one column more than the longest context: a token sampled at its end has a
  place, and nobody reads it.
- Updates carry what the host's table holds after all of a step's, so their order does not matter.
Read next: ``request_table.py`` (the host's), ``device_runner.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.request import Int32Array, Int64Array, RowUpdate

Entries = tuple[Int64Array, Int32Array]
"""Flat places in a table, and what goes there."""


class DeviceTables:
    """tokens: ``int32[(max_requests + 1) * width]``. kv_slots: ``int32[max_requests + 1, ..]``."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        num_rows = config.max_requests + 1
        self.width = config.max_context + 1
        self.sink_row = config.max_requests
        self.tokens = torch.zeros(num_rows * self.width, dtype=torch.int32, device=device)
        shape = (num_rows, config.table_width)
        self.kv_slots = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.tokens.nbytes + self.kv_slots.nbytes

    @property
    def sink_at(self) -> int:
        """Where the sink row of ``tokens`` begins."""
        return self.sink_row * self.width

    def token_at(self, rows: Int32Array, positions: Int32Array | Int64Array) -> Int64Array:
        """Places in ``tokens``."""
        return rows.astype(np.int64) * self.width + positions

    def write(self, table: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
        """Entries on the device into one of the tables."""
        table.view(-1).scatter_(0, at, values)


def entries_of(updates: Sequence[RowUpdate], host: Int32Array, width: int) -> Entries | None:
    """What the host's table holds now where ``updates`` were written; None: there are none.

    width: of the device's rows, at least the host's.
    """
    if not updates:
        return None
    places, values = [], []
    for update in updates:
        end = update.start + len(update.values)
        places.append(np.arange(update.start, end) + update.row * width)
        values.append(host[update.row, update.start : end])
    return np.concatenate(places), np.concatenate(values)

"""The numbers of a decode step in memory of fixed place: columns of rows, padded with sinks.

Owns: which column stands where, what padding is. Does not know: models, what reads them.

Invariants:
- A column of any size begins where the largest begins, so one layout serves all sizes.
- A padded row reads and writes nothing that is alive: state slot 0, row 0 of the draft buffers, KV
  slot 0, the sink row of the tables, and a start of -1, so that it sees no key.
Read next: ``graphs.py``, ``device_runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hyradix.request import SINK, Int32Array, Int64Array
from hyradix.runner.staging import aligned

_NARROW = ("rows", "starts", "positions", "write_slots", "slots", "log_rows", "num_log_rows")
_WIDE = ("token_at", "next_at")


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """On the device, all ``int32[N]`` but for the last two, ``int64[N]``.

    rows: of the KV table. starts, positions: where the token stands; -1 and 0 in padding.
    write_slots: of its KV. slots: working states. log_rows: of the draft buffers. num_log_rows:
    valid ones. token_at, next_at: where the token table has the token, and takes the next one.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    slots: torch.Tensor
    log_rows: torch.Tensor
    num_log_rows: torch.Tensor
    token_at: torch.Tensor
    next_at: torch.Tensor


class DecodeForm:
    """The host's side: ``numbers`` is what ``Staging`` sends as its fixed part."""

    def __init__(self, max_rows: int, sink_row: int, sink_at: int) -> None:
        """sink_row: of the tables. sink_at: where it begins in the token table."""
        self._max_rows = aligned(max_rows)
        count = len(_NARROW) * self._max_rows
        self.numbers = np.zeros(count + 2 * len(_WIDE) * self._max_rows, np.int32)
        self._narrow: Int32Array = self.numbers[:count].reshape(len(_NARROW), -1)
        self._wide: Int64Array = self.numbers[count:].view(np.int64).reshape(len(_WIDE), -1)
        padding = {"rows": sink_row, "starts": -1, "write_slots": SINK, "slots": SINK}
        self._padding = np.array([[padding.get(name, 0)] for name in _NARROW], np.int32)
        self._wide_padding = np.array([[sink_at], [sink_at + 1]], np.int64)
        self.clear()

    def clear(self) -> None:
        """Padding alone."""
        self._narrow[:] = self._padding
        self._wide[:] = self._wide_padding

    def fill(
        self,
        rows: Int32Array,
        starts: Int32Array,
        write_slots: Int32Array,
        slots: Int32Array,
        num_log_rows: Int32Array,
        token_at: Int64Array,
        next_at: Int64Array,
    ) -> None:
        """Rows, then padding up to the end."""
        count = len(rows)
        columns = (rows, starts, starts, write_slots, slots, rows + np.int32(1), num_log_rows)
        for to, column in zip(self._narrow, columns, strict=True):
            to[:count] = column
        self._wide[0, :count], self._wide[1, :count] = token_at, next_at
        self._narrow[:, count:] = self._padding
        self._wide[:, count:] = self._wide_padding

    def columns(self, static: torch.Tensor, size: int) -> DecodeColumns:
        """Views of the first ``size`` rows in ``Staging.static``."""
        count = self._narrow.size
        narrow = static[:count].view(len(_NARROW), -1)[:, :size]
        wide = static[count:].view(torch.int64).view(len(_WIDE), -1)[:, :size]
        return DecodeColumns(*narrow, *wide)

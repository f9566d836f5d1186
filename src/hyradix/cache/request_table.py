"""The request table: which KV slot holds which position of which running request.

Owns: ``kv_slots`` int32 [max_requests, width] and the free rows. The data plane keeps a copy that
is changed by the row updates of a ``ScheduledBatch`` and by ``slot_order`` where drafts were
verified. Columns past ``max_context`` hold draft nodes only.
Read next: ``prefix_cache.py``.
"""

from __future__ import annotations

import numpy as np

from hyradix.request import Int32Array


class RequestTable:
    """Rows are handed out lowest first; a row's contents mean nothing past its owner's length."""

    def __init__(self, max_requests: int, width: int) -> None:
        self.max_requests = max_requests
        self.kv_slots: Int32Array = np.zeros((max_requests, width), dtype=np.int32)
        self._free = list(range(max_requests - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request owns."""
        return len(self._free)

    def take(self) -> int:
        """A free row. The caller has checked ``num_free``."""
        return self._free.pop()

    def release(self, row: int) -> None:
        """Give a row back."""
        assert row not in self._free, "row released twice"
        self._free.append(row)

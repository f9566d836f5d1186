"""One ``ScheduledBatch`` as the arrays that a forward takes.

Owns: flattening rows to tokens, ordering saves. Does not know: models, pools.
Invariant: arrays are fresh, contiguous int32: kernels see one set of types whatever came down.
Read next: ``runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.request import Int32Array, ScheduledBatch, StateSave
from hyradix.runner.request_table import RequestTable

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """token_ids: ``int32[T]``, rows one after the other."""

    token_ids: Int32Array
    states: RaggedStates
    queries: RaggedQueries


def prepare(batch: ScheduledBatch, table: RequestTable) -> PreparedBatch:
    """Flatten a batch with at least one row, after its updates were written to ``table``."""
    rows, starts = np.array(batch.rows, np.int32), np.array(batch.starts, np.int32)
    counts = np.asarray(batch.num_tokens, np.int32)
    cu_seqlens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    if int(cu_seqlens[-1]) == len(rows):  # one token each
        token_rows, positions, write_from = rows, starts, batch.write_from
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(cu_seqlens[-1], dtype=np.int32)
        positions += np.repeat(starts - cu_seqlens[:-1], counts)
        write_from = np.repeat(batch.write_from, counts)
    slots = table.kv_slots[token_rows, positions]
    write_slots = np.where(positions >= write_from, slots, np.int32(0))
    queries = RaggedQueries.of(cu_seqlens, rows, starts, positions, write_slots, table.kv_slots)
    offsets, save_at, save_slots = _order_saves(batch.saves, rows, starts)
    states = RaggedStates(
        cu_seqlens, np.array(batch.state_slots, np.int32), offsets, save_at, save_slots
    )
    return PreparedBatch(table.token_ids[token_rows, positions], states, queries)


def _order_saves(
    saves: tuple[StateSave, ...], rows: Int32Array, starts: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Saves by batch row and depth: offsets ``[N+1]``, token counts ``[S]``, slots ``[S]``."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    if not saves:
        return offsets, _NONE, _NONE
    index = {row: i for i, row in enumerate(rows.tolist())}
    ordered = sorted(saves, key=lambda save: (index[save.row], save.depth))
    for save in ordered:
        offsets[index[save.row] + 1] += 1
    np.cumsum(offsets, out=offsets)
    counts = [save.depth - int(starts[index[save.row]]) for save in ordered]
    slots = [save.slot for save in ordered]
    return offsets, np.array(counts, np.int32), np.array(slots, np.int32)

"""One ``ScheduledBatch`` as the arrays that a forward takes.

Owns: flattening rows to tokens, ordering rows and saves. Does not know: models, pools.

Invariants:
- Plain rows stand first, then the rows that are verified as trees, each group in the batch's order.
- Arrays are fresh, contiguous int32: kernels see one set of types whatever came down.
Read next: ``runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.request import Int32Array, ScheduledBatch, StateSave
from hyradix.runner.request_table import RequestTable

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Which rows of the batch are verified as trees: ``index`` ``int32[M]``, and their nodes.

    token_ids: ``int32[total]``; a root's is the row's token at its start.
    """

    index: Int32Array
    trees: FlatTrees
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """What the model is run on, T tokens.

    order: ``int32[N]`` the batch's rows in the order of the tokens. cu_tokens: ``int32[N+1]``.
    token_ids: ``int32[T]``. states: the plain rows' only. queries: all rows'.
    """

    order: Int32Array
    cu_tokens: Int32Array
    token_ids: Int32Array
    states: RaggedStates
    queries: RaggedQueries

    @property
    def num_plain(self) -> int:
        """Rows that are not verified as trees."""
        return len(self.states.slots)


def prepare(
    batch: ScheduledBatch, table: RequestTable, verified: TreeRows | None = None
) -> PreparedBatch:
    """Flatten a batch with at least one row, after its updates were written to ``table``."""
    starts, counts = np.array(batch.starts, np.int32), np.array(batch.num_tokens, np.int32)
    rows, order = np.array(batch.rows, np.int32), np.arange(batch.num_rows, dtype=np.int32)
    write_from, num_plain = batch.write_from, batch.num_rows
    if verified is not None:
        is_plain = np.ones(len(rows), np.bool_)
        is_plain[verified.index] = False
        order = np.concatenate([np.flatnonzero(is_plain), verified.index]).astype(np.int32)
        counts[verified.index] = np.diff(verified.trees.cu_nodes)
        rows, starts, counts, write_from = (x[order] for x in (rows, starts, counts, write_from))
        num_plain -= len(verified.index)
    cu_tokens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=cu_tokens[1:])
    if int(cu_tokens[-1]) == len(rows):  # one token each
        token_rows, columns = rows, starts
    else:
        token_rows = np.repeat(rows, counts)
        columns = np.arange(cu_tokens[-1], dtype=np.int32)
        columns += np.repeat(starts - cu_tokens[:-1], counts)
        write_from = np.repeat(write_from, counts)
    write_slots = np.where(columns >= write_from, table.kv_slots[token_rows, columns], np.int32(0))
    if verified is None:
        positions, token_ids = columns, table.token_ids[token_rows, columns]
        trees = None
    else:
        trees, first = verified.trees, int(cu_tokens[num_plain])
        positions = columns.copy()
        positions[first:] = np.repeat(starts[num_plain:], counts[num_plain:]) + trees.depths
        plain = table.token_ids[token_rows[:first], columns[:first]]
        token_ids = np.concatenate([plain, verified.token_ids])
    queries = RaggedQueries.of(
        cu_tokens, rows, starts, positions, write_slots, table.kv_slots, trees=trees
    )
    plain_rows = order[:num_plain]
    offsets, save_at, save_slots = order_saves(
        batch.saves, rows[:num_plain], starts[:num_plain], counts[:num_plain]
    )
    states = RaggedStates(
        cu_tokens[: num_plain + 1].copy(),
        np.array(batch.state_slots[plain_rows], np.int32),
        offsets,
        save_at,
        save_slots,
    )
    return PreparedBatch(order, cu_tokens, token_ids, states, queries)


def logit_tokens(batch: ScheduledBatch, prepared: PreparedBatch) -> Int32Array:
    """Tokens whose logits are taken: the last of each plain row that samples, then all nodes."""
    num_plain, cu_tokens = prepared.num_plain, prepared.cu_tokens
    is_sampled = batch.samples[prepared.order[:num_plain]]
    last = cu_tokens[1 : num_plain + 1][is_sampled] - np.int32(1)
    if num_plain == len(prepared.order):
        return last
    return np.concatenate([last, _nodes(prepared)])


def last_tokens(prepared: PreparedBatch, most: int) -> Int32Array:
    """The last tokens of each plain row, ``most`` or all that it has, then all nodes."""
    cu_tokens = prepared.cu_tokens[: prepared.num_plain + 1]
    counts = np.minimum(np.diff(cu_tokens), np.int32(most))
    index = np.arange(counts.sum(), dtype=np.int32)
    index += np.repeat(cu_tokens[1:] - np.cumsum(counts, dtype=np.int32), counts)
    return np.concatenate([index, _nodes(prepared)])


def _nodes(prepared: PreparedBatch) -> Int32Array:
    cu_tokens = prepared.cu_tokens
    return np.arange(cu_tokens[prepared.num_plain], cu_tokens[-1], dtype=np.int32)


def wanted_tokens(
    prepared: PreparedBatch, index: Int32Array, verified: TreeRows | None
) -> WantedTokens:
    """Those of ``index``, ascending: at the end of each plain row, and all nodes."""
    queries = prepared.queries
    bounds = np.searchsorted(index, prepared.cu_tokens)
    counts = np.diff(bounds)
    has_any = counts > 0
    cu_wanted = np.zeros(np.count_nonzero(has_any) + 1, np.int32)
    np.cumsum(counts[has_any], out=cu_wanted[1:])
    positions = queries.positions[index]
    seen = RaggedQueries.of(
        cu_wanted, queries.rows[has_any], positions[cu_wanted[:-1]], positions,
        np.zeros(len(index), np.int32), queries.kv_table,
        trees=None if verified is None else verified.trees,
    )  # fmt: skip
    return WantedTokens(index, seen)


def order_saves(
    saves: tuple[StateSave, ...], rows: Int32Array, starts: Int32Array, counts: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The plain rows' saves by row and depth: offsets ``[N+1]``, token counts, slots ``[S]``.

    A row that might have had drafts and has none does not reach all of its saves.
    """
    offsets = np.zeros(len(rows) + 1, np.int32)
    if not saves:
        return offsets, _NONE, _NONE
    index = {row: i for i, row in enumerate(rows.tolist())}
    ends = dict(zip(rows.tolist(), (starts + counts).tolist(), strict=True))
    mine = (save for save in saves if save.depth <= ends.get(save.row, 0))
    ordered = sorted(mine, key=lambda save: (index[save.row], save.depth))
    for save in ordered:
        offsets[index[save.row] + 1] += 1
    np.cumsum(offsets, out=offsets)
    places = [save.depth - int(starts[index[save.row]]) for save in ordered]
    slots = [save.slot for save in ordered]
    return offsets, np.array(places, np.int32), np.array(slots, np.int32)

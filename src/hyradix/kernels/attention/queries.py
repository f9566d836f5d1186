"""Which KV columns the queries of one step see: rows one after the other, draft trees last.

Owns: ``RaggedQueries``, how rows split into blocks and single tokens; ``WantedTokens`` of them.
Does not know: tensors.

Invariants:
- A token sees table columns [first, its position + 1) of its row; a node of a draft tree sees
  [first, start) and then, of the columns behind, those of its path, root first, its own last.
- A chain's nodes see the columns that plain decode would, in the same order.
- Positions before ``write_from`` are read from the pool, never written.
Read next: ``reference.py``, ``../tree_recurrence/ragged.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyradix.kernels.tree_recurrence.ragged import FlatTrees

Int32Array = npt.NDArray[np.int32]
SHORT = 8
"""Rows with at most this many new tokens attend token by token."""


@dataclass(frozen=True, slots=True)
class RaggedQueries:
    """Which positions of which table rows the tokens are.

    cu_seqlens: ``int32[N+1]``. rows: ``int32[N]`` rows of ``kv_table``. starts: ``int32[N]`` first
    positions. positions: ``int32[T]``. write_slots: ``int32[T]``, 0 where nothing is written.
    kv_table: ``int32[max_requests, max_context]``. first: the first column that anybody sees.
    num_trees: rows at the end that are draft trees. The rest splits the tokens, see ``of``:
    long_rows: indices of rows that attend by blocks. short_tokens, short_rows: ``int32[S]`` tokens
    of all other rows, the table row of each. short_lengths: ``int32[S]``: a token sees columns
    [first, length), then tail_columns[tail_offsets[i] : tail_offsets[i+1]].
    """

    cu_seqlens: Int32Array
    rows: Int32Array
    starts: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    kv_table: Int32Array
    first: int
    num_trees: int
    long_rows: tuple[int, ...]
    short_tokens: Int32Array
    short_rows: Int32Array
    short_lengths: Int32Array
    tail_offsets: Int32Array
    tail_columns: Int32Array

    @classmethod
    def of(
        cls,
        cu_seqlens: Int32Array,
        rows: Int32Array,
        starts: Int32Array,
        positions: Int32Array,
        write_slots: Int32Array,
        kv_table: Int32Array,
        *,
        trees: FlatTrees | None = None,
        first: int = 0,
    ) -> RaggedQueries:
        """Rows with more than ``SHORT`` tokens attend by blocks, the others token by token.

        trees: of the last rows, in their order; each node attends by itself, however many there
        are. first: no token may stand before it.
        """
        assert first == 0 or len(starts) == 0 or int(starts.min()) >= first
        counts = np.diff(cu_seqlens)
        num_trees = trees.num_trees if trees is not None else 0
        is_long = counts > SHORT
        is_long[len(rows) - num_trees :] = False
        longest = int(counts.max(initial=0))
        long_rows = tuple(np.flatnonzero(is_long).tolist()) if longest > SHORT else ()
        if longest == 1 and int(counts.min()) == 1:  # all decode: the tokens are the rows
            tokens, token_rows = np.arange(len(rows), dtype=np.int32), rows
        else:
            tokens = np.flatnonzero(np.repeat(~is_long, counts)).astype(np.int32)
            token_rows = np.repeat(rows, counts)[tokens]
        lengths = positions[tokens] + np.int32(1)
        tail_offsets = np.zeros(len(tokens) + 1, np.int32)
        tail_columns = np.zeros(0, np.int32)
        if trees is not None:
            tail_columns = _add_trees(trees, counts, starts, lengths, tail_offsets)
        return cls(
            cu_seqlens, rows, starts, positions, write_slots, kv_table, first, num_trees,
            long_rows, tokens, token_rows, lengths, tail_offsets, tail_columns,
        )  # fmt: skip

    @classmethod
    def singles(
        cls,
        rows: Int32Array,
        positions: Int32Array,
        write_slots: Int32Array,
        kv_table: Int32Array,
        *,
        first: int = 0,
    ) -> RaggedQueries:
        """One token of each row, which sees the columns from ``first`` to its own."""
        cu_seqlens = np.arange(len(rows) + 1, dtype=np.int32)
        return cls(
            cu_seqlens, rows, positions, positions, write_slots, kv_table, first, 0, (),
            cu_seqlens[:-1], rows, positions + np.int32(1), np.zeros(len(rows) + 1, np.int32),
            np.zeros(0, np.int32),
        )  # fmt: skip

    @property
    def tree_tokens(self) -> range:
        """Where the nodes of the trees stand in ``short_tokens``."""
        num_nodes = int(self.cu_seqlens[-1] - self.cu_seqlens[len(self.rows) - self.num_trees])
        return range(len(self.short_tokens) - num_nodes, len(self.short_tokens))

    def row(self, i: int) -> tuple[slice, Int32Array, int]:
        """Of row i, no tree: its tokens, the slots of the columns from ``first`` on, and at which
        of those its first token stands."""
        tokens = slice(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1]))
        slots = self.kv_table[self.rows[i], self.first :]
        return tokens, slots, int(self.starts[i]) - self.first

    def slots_seen(self, i: int) -> Int32Array:
        """Slots that token ``short_tokens[i]`` sees, in the order of the sums."""
        row = self.kv_table[self.short_rows[i]]
        tail = self.tail_columns[self.tail_offsets[i] : self.tail_offsets[i + 1]]
        return np.concatenate([row[self.first : self.short_lengths[i]], row[tail]])


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """M tokens of a step, those that are asked for behind the last mixer.

    index: ``int32[M]`` which they are. queries: what each of them sees, M tokens in that order.
    """

    index: Int32Array
    queries: RaggedQueries


def _add_trees(
    trees: FlatTrees,
    counts: Int32Array,
    starts: Int32Array,
    lengths: Int32Array,
    tail_offsets: Int32Array,
) -> Int32Array:
    """Fill the entries of all nodes, which are the last tokens; returns the tails' columns."""
    sizes, num_nodes = np.diff(trees.cu_nodes), int(trees.cu_nodes[-1])
    assert np.array_equal(counts[len(counts) - len(sizes) :], sizes), "trees are the last rows"
    node_starts = np.repeat(starts[len(starts) - len(sizes) :], sizes)
    begin = len(lengths) - num_nodes
    lengths[begin:] = node_starts
    tail_offsets[begin:] = trees.path_offsets
    columns = trees.path_nodes + np.repeat(node_starts, np.diff(trees.path_offsets))
    return columns.astype(np.int32)

"""Drafts by the checkpoint's own draft layer (``mtp``), which has KV of its own for every token.

Owns: which pairs the layer has seen, and its output for the newest. Does not know: the pools'
sizes, who was accepted.

Columns of one row that has consumed n tokens (its root t_n at column n):

    0        1 .. n-1           n                     n+1 .. n+T-2
    no pair  (h_{i-1}, t_i)     (h_{n-1}, t_n), if    scratch: nodes that this round expands
             kept               the token has a slot

Invariants:
- The pair (h_{i-1}, t_i) has its KV in the slot of token i, so it depends on nothing that follows;
  what a draft wrote there is written again, by ``learn``, with the target's hidden state.
- Only columns that the row owns are written: from ``write_from`` on (the tree may have taken them
  since; for the same tokens the pair is the same), and scratch.
- A slot whose token was passed over is void: the first followed row that sees it puts zeros there.
  They weigh little, and nothing is read that was never written.
- A row that is followed again at another depth than it was left at lacks h of the token before:
  that token has no pair either.
- The output for the newest pair is the first step of the next round. A row without it (its newest
  token had no slot, or has got another one since) gets no drafts in that round.
Read next: ``models/draft_heads.py``.
"""

from __future__ import annotations

import numpy as np
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.ops import Array
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.models.draft_heads import DraftHead
from hyradix.request import BoolArray, Int32Array, Int64Array
from hyradix.spec_config import ProposerName
from hyradix.spec_decode.beam import Frontier
from hyradix.spec_decode.head_proposer import HeadProposer
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound

FIRST = 1
"""The first column that has a pair."""


class MtpProposer(HeadProposer):
    """See ``proposer.Proposer``. k, v: the draft layer's part of the KV pool, written."""

    name: ProposerName = "mtp"
    num_draft_layers = 1

    def __init__(
        self, head: DraftHead, token_ids: Int32Array, kv_slots: Int32Array, k: Array, v: Array
    ) -> None:
        super().__init__(head, token_ids, kv_slots, k, v)
        self._outputs = torch.zeros_like(self._last)
        self._newest = np.full(len(token_ids), -1, np.int32)
        """Column whose pair ``_outputs`` is for; -1: none."""
        self._newest_slot = np.zeros(len(token_ids), np.int32)
        self._is_void = np.ones(k.shape[0], np.bool_)
        self._is_whole = np.zeros(len(token_ids), np.bool_)
        """Rows in which no void slot stands before the newest pair."""

    def enter(self, row: int, start: int, hidden: torch.Tensor | None) -> None:
        """See ``proposer.Proposer``."""
        super().enter(row, start, hidden)
        self._newest[row], self._is_whole[row] = -1, False

    def learn(self, step: ConsumedTokens) -> None:
        """See ``proposer.Proposer``. Cost: the layer over every pair that is new."""
        has_next = (step.next_slots > 0) & (step.ends < self._token_ids.shape[1])
        is_known = self._has_newest(step.rows, step.starts)
        begins = np.maximum(np.maximum(step.starts + is_known, step.write_from), FIRST)
        begins = self._take_up(step, begins.astype(np.int32))
        assert bool((begins <= step.ends)[has_next].all()), "a next token stands in a shared slot"
        counts = (step.ends + has_next - begins).astype(np.int32)
        index = np.flatnonzero(counts > 0)
        if len(index):
            x, cu_pairs = self._run_pairs(step, index, begins[index], counts[index])
            is_newest = has_next[index]
            rows, last = step.rows[index][is_newest], cu_pairs[1:][is_newest] - 1
            newest = self._ops.tensor(self._ops.select(x, last))
            self._outputs[self._index(rows)] = newest
            self._newest[rows] = step.ends[has_next]
            self._newest_slot[rows] = step.next_slots[has_next]
        self._remember(step)

    def pass_over(self, rows: Int32Array, slots: Int32Array) -> None:
        """See ``proposer.Proposer``."""
        self._is_whole[rows] = False
        self._is_void[slots] = True

    def warm_up(self) -> None:
        """See ``proposer.Proposer``."""
        zero, one, cu = np.zeros(1, np.int32), np.ones(1, np.int32), np.arange(2, dtype=np.int32)
        table = np.zeros((1, 2), np.int32)
        node = FlatTrees(cu, -one, zero, cu, zero)
        for trees in (None, node):
            queries = RaggedQueries.of(cu, zero, one, one, zero, table, trees=trees, first=FIRST)
            hidden = self._of_rows(self._last, zero)
            x = self._head.forward(zero, hidden, queries, self._k, self._v)
            self._head.logits(x)
            self._head.normalize(x)

    def _take_up(self, step: ConsumedTokens, begins: Int32Array) -> Int32Array:
        """Where the pairs of each row begin; zeros for what new followers see and nobody made."""
        for i in np.flatnonzero(~self._is_whole[step.rows]).tolist():
            row, start = int(step.rows[i]), int(step.starts[i])
            if self._followed_to[row] != start and start >= begins[i]:
                begins[i] = start + 1
                self._is_void[self._kv_slots[row, start]] = True
            newest = self._newest[row]  # its token was passed over, its pair is older
            if newest >= 0 and self._kv_slots[row, newest] == self._newest_slot[row]:
                self._is_void[self._newest_slot[row]] = False
            seen = self._kv_slots[row, FIRST : begins[i]]
            void = seen[self._is_void[seen]]
            if len(void):
                self._is_void[void] = False
                for pool in (self._k, self._v):
                    self._ops.tensor(pool).index_fill_(0, self._index(void), 0.0)
        self._is_whole[step.rows] = True
        return begins

    def _has_newest(self, rows: Int32Array, columns: Int32Array) -> BoolArray:
        """Where the newest pair is that of ``columns``, and still has its KV there."""
        slots = self._kv_slots[rows, columns]
        result: BoolArray = (self._newest[rows] == columns) & (self._newest_slot[rows] == slots)
        return result

    def _run_pairs(
        self, step: ConsumedTokens, index: Int64Array, begins: Int32Array, counts: Int32Array
    ) -> tuple[Array, Int32Array]:
        """The layer over pairs [begins, begins + counts) of the step's rows ``index``.

        Returns its output, and where each row's part of it begins.
        """
        cu_pairs = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=cu_pairs[1:])
        owner = np.repeat(index, counts)
        positions = np.arange(cu_pairs[-1], dtype=np.int32)
        positions += np.repeat(begins - cu_pairs[:-1], counts)
        rows = step.rows[owner]
        slots = self._kv_slots[rows, positions]
        self._is_void[slots] = False
        queries = RaggedQueries.of(
            cu_pairs, step.rows[index], begins, positions, slots, self._kv_slots, first=FIRST
        )
        x = self._head.forward(
            self._token_ids[rows, positions],
            self._hidden_before(step, owner, positions),
            queries,
            self._k,
            self._v,
        )
        return x, cu_pairs

    def _hidden_before(
        self, step: ConsumedTokens, owner: Int64Array, positions: Int32Array
    ) -> Array:
        """h of the token before each position: of this step, or the last of the step before."""
        behind = positions - step.starts[owner] - 1
        index = np.maximum(step.cu_tokens[:-1][owner] + behind, 0).astype(np.int32)
        hidden = self._ops.select(step.hidden, index)
        at_start = np.flatnonzero(behind < 0)
        if len(at_start):
            held = self._last.index_select(0, self._index(step.rows[owner[at_start]]))
            self._ops.tensor(hidden).index_copy_(0, self._index(at_start), held)
        return hidden

    def _is_ready(self, batch: DraftRound) -> BoolArray:
        return self._has_newest(batch.rows, batch.starts)

    def _expand_roots(self, batch: DraftRound, frontier: Frontier) -> Array:
        """It was computed when the root was sampled."""
        return self._of_rows(self._outputs, batch.rows[frontier.trees])

    def _expand(self, batch: DraftRound, frontier: Frontier, hidden: Array) -> Array:
        """Each node sees pairs 1..n-1, then its path: the root's at column n, scratch behind it."""
        rows, starts = batch.rows[frontier.trees], batch.starts[frontier.trees]
        if batch.shape.topk == 1:  # the path of a chain stands in columns n, n+1, ..
            columns = starts + np.int32(frontier.depth)
            own = self._kv_slots[rows, columns]
            singles = RaggedQueries.singles(rows, columns, own, self._kv_slots, first=FIRST)
            return self._head.forward(frontier.token_ids, hidden, singles, self._k, self._v)
        count, length = frontier.paths.shape
        each = np.arange(count + 1, dtype=np.int32)
        alone = FlatTrees(  # trees of one node: those above them were computed before
            cu_nodes=each,
            parents=np.full(count, -1, np.int32),
            depths=np.full(count, frontier.depth, np.int32),
            path_offsets=each * np.int32(length),
            path_nodes=frontier.paths.reshape(-1),
        )
        slots = self._kv_slots[rows, starts + frontier.paths[:, -1]]
        positions = starts + np.int32(frontier.depth)
        queries = RaggedQueries.of(
            each, rows, starts, positions, slots, self._kv_slots, trees=alone, first=FIRST
        )
        return self._head.forward(frontier.token_ids, hidden, queries, self._k, self._v)

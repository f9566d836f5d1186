"""Drafts by a light head that owns no KV (``frozen_kv_mtp``): it reads what the target wrote.

Owns: nothing but the rows' last hidden states. Does not know: draft KV; there is none.
Invariants:
- Every node of a row attends to the target's last attention layer at columns 0..n-1, from position
  n-1, whatever its depth: what it knows of its path came through the hidden state.
- k and v are read-only views: what would write through them raises ``ValueError``.
Read next: ``models/draft_heads.py``.
"""

from __future__ import annotations

import numpy as np

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.ops import Array
from hyradix.request import BoolArray, Int32Array
from hyradix.spec_config import ProposerName
from hyradix.spec_decode.beam import Frontier
from hyradix.spec_decode.head_proposer import HeadProposer
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound


class FrozenKvMtpProposer(HeadProposer):
    """See ``proposer.Proposer``. k, v: of the target's last attention layer, read-only."""

    name: ProposerName = "frozen_kv_mtp"
    num_draft_layers = 0

    def learn(self, step: ConsumedTokens) -> None:
        """See ``proposer.Proposer``."""
        self._remember(step)

    def pass_over(self, rows: Int32Array, slots: Int32Array) -> None:
        """See ``proposer.Proposer``. The depth of what is held tells that it is old."""

    def warm_up(self) -> None:
        """See ``proposer.Proposer``."""
        none = np.zeros(1, np.int32)
        hidden = self._of_rows(self._last, none)
        x = self._run(none, none + 1, np.zeros((1, 2), np.int32), none, hidden)
        self._head.logits(x)
        self._head.normalize(x)

    def _is_ready(self, batch: DraftRound) -> BoolArray:
        result: BoolArray = self._followed_to[batch.rows] == batch.starts
        return result

    def _expand_roots(self, batch: DraftRound, frontier: Frontier) -> Array:
        hidden = self._of_rows(self._last, batch.rows[frontier.trees])
        return self._expand(batch, frontier, hidden)

    def _expand(self, batch: DraftRound, frontier: Frontier, hidden: Array) -> Array:
        rows, starts = batch.rows[frontier.trees], batch.starts[frontier.trees]
        return self._run(rows, starts, self._kv_slots, frontier.token_ids, hidden)

    def _run(
        self,
        rows: Int32Array,
        num_consumed: Int32Array,
        kv_table: Int32Array,
        token_ids: Int32Array,
        hidden: Array,
    ) -> Array:
        at = num_consumed - np.int32(1)
        queries = RaggedQueries.singles(rows, at, np.zeros_like(at), kv_table)
        return self._head.forward(token_ids, hidden, queries, self._k, self._v)

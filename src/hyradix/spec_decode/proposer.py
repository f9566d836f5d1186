"""What the runner asks of whoever proposes draft tokens.

Owns: ``Proposer`` and the two values that it is told: ``DraftRound`` and ``ConsumedTokens``.
Does not know: pools, verification, which proposer there is.

Words: a row has consumed n tokens when positions 0..n-1 went through the target; t_i is the token
at position i, h_i the target's hidden state there, after its final norm. The root of a tree is t_n.
Invariants:
- The order of a step is: ``enter`` (rows that begin), ``propose`` (rows that may have drafts), the
  target's forward, row updates of what was accepted, ``learn`` or ``pass_over`` (every row of the
  forward).
- A proposer writes only its own layer's part of slots that the row owns; the cache never sees it.
- What is proposed for a row does not depend on the other rows beyond rounding.
Read next: ``ngram.py``, ``mtp.py``, ``frozen_kv_mtp.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hyradix.kernels.ops import Array
from hyradix.request import Int32Array
from hyradix.spec_config import DraftShape, ProposerName
from hyradix.spec_decode.drafts import Drafts


@dataclass(frozen=True, slots=True)
class DraftRound:
    """Rows to draft for, each at most once.

    rows: ``int32[B]``. starts: ``int32[B]``, n: tokens consumed; the root stands at column n of the
    token table. max_nodes: ``int32[B]``, the root included; columns n..n+max_nodes-1 of the slot
    table hold slots that the row owns. max_depth: ``int32[B]`` of the deepest node.
    """

    rows: Int32Array
    starts: Int32Array
    max_nodes: Int32Array
    max_depth: Int32Array
    shape: DraftShape


@dataclass(frozen=True, slots=True)
class ConsumedTokens:
    """What one forward consumed, after the slot table was reordered to what was accepted.

    rows, starts, ends: ``int32[B]``: positions starts..ends-1 were consumed, at least one; some of
    them in steps before, where the row was passed over and is told only now.
    write_from: ``int32[B]``: slots of positions before it are shared, and hold their draft KV
    or were passed over; at most ends where there is a next slot.
    next_slots: ``int32[B]``: where t_ends is in the token table and has a slot: that slot (the
    table names it at column ends); 0: no such token yet, or no slot could be had.
    hidden: ``[sum, hidden]`` h of the consumed positions, row by row; None where the proposer does
    not use it.
    """

    rows: Int32Array
    starts: Int32Array
    ends: Int32Array
    write_from: Int32Array
    next_slots: Int32Array
    hidden: Array | None

    @property
    def cu_tokens(self) -> Int32Array:
        """``int32[B+1]``: where each row's part of ``hidden`` begins."""
        offsets = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.ends - self.starts, out=offsets[1:])
        return offsets


class Proposer(Protocol):
    """Proposes draft trees for rows of one request table."""

    @property
    def name(self) -> ProposerName:
        """As ``--spec`` calls it."""

    @property
    def uses_hidden(self) -> bool:
        """Whether it needs h: then states and held rows carry it."""

    @property
    def keeps_up(self) -> bool:
        """Whether it is to be told what was consumed; else ``learn``, ``pass_over`` do nothing."""

    @property
    def num_draft_layers(self) -> int:
        """Attention layers of its own in the KV pool, behind the target's."""

    def enter(self, row: int, start: int, hidden: torch.Tensor | None) -> None:
        """A request begins in ``row`` at depth ``start``; what was known of the row is void.

        hidden: ``[hidden]``, h of the last token of the state that it resumes from; None at
        depth 0, or where h is not used. Copied.
        """

    def propose(self, batch: DraftRound) -> Drafts:
        """A tree for each row of ``batch``, in its order; the root alone where there is no draft.

        Effects: may write the draft layer's KV in columns n+1..n+max_nodes-2 of the rows.
        """

    def learn(self, step: ConsumedTokens) -> None:
        """Take in what a forward consumed. Called after every forward, for the rows followed.

        A row may be followed again after it was passed over: it can draft from the next round on.
        """

    def pass_over(self, rows: Int32Array, slots: Int32Array) -> None:
        """Tokens of ``rows`` were consumed that ``learn`` is not told of, in ``slots``.

        Another row may read these slots later: what was there before must not be seen.
        Cost: next to nothing, it is called for rows that are to run as if there were no drafts.
        """

    def warm_up(self) -> None:
        """Compile every kernel that is used, on the sinks alone."""

"""What proposers with a draft head have in common: the rows' last hidden states, and the beam.

Owns: h of the last consumed token of followed rows; the loop that grows trees step by step, in one
batch over all rows. Does not know: where the head's keys and values are.
Invariant: logits are computed for nodes that are expanded, and for no others.
Read next: ``mtp.py``, ``frozen_kv_mtp.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from hyradix.kernels.ops import Array
from hyradix.models.draft_heads import DraftHead
from hyradix.request import BoolArray, Int32Array, Int64Array
from hyradix.spec_decode.beam import Beam, FloatArray, Frontier
from hyradix.spec_decode.chain import Chains
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound

NEVER = -1
"""Instead of the depth that a row was followed to."""


class HeadProposer(ABC):
    """See ``proposer.Proposer``.

    token_ids, kv_slots: ``int32[max_requests, width]``, the runner's tables; only read.
    k, v: ``[num_kv_slots + 1, Hkv, D]`` as ``DraftHead.forward`` takes them.
    """

    uses_hidden = True
    keeps_up = True

    def __init__(
        self, head: DraftHead, token_ids: Int32Array, kv_slots: Int32Array, k: Array, v: Array
    ) -> None:
        self._head = head
        self._ops = head.ops
        self._token_ids = token_ids
        self._kv_slots = kv_slots
        self._k = k
        self._v = v
        ops = head.ops
        size = (len(token_ids), head.hidden_size)
        self._last = torch.zeros(size, device=ops.device, dtype=ops.dtype)
        self._followed_to = np.full(len(token_ids), NEVER, np.int32)
        """Tokens consumed up to the one that ``_last`` is of; ``NEVER``."""

    def enter(self, row: int, start: int, hidden: torch.Tensor | None) -> None:
        """See ``proposer.Proposer``."""
        self._followed_to[row] = start
        if hidden is not None:
            self._last[row] = hidden

    def propose(self, batch: DraftRound) -> Drafts:
        """See ``proposer.Proposer``."""
        head, topk = self._head, batch.shape.topk
        roots = self._token_ids[batch.rows, batch.starts]
        max_nodes = np.where(self._is_ready(batch), batch.max_nodes, 1)
        grown = Chains if topk == 1 else Beam
        beam = grown(roots, max_nodes, batch.max_depth, batch.shape)
        frontier = beam.frontier()
        if frontier is None:
            return beam.finish()
        x = self._expand_roots(batch, frontier)
        while True:
            beam.grow(*children_of(head.logits(x), topk))
            frontier = beam.frontier()
            if frontier is None:
                return beam.finish()
            hidden = self._ops.select(head.normalize(x), frontier.parents.astype(np.int32))
            x = self._expand(batch, frontier, hidden)

    def _remember(self, step: ConsumedTokens) -> None:
        """Keep h of each row's last token."""
        self._followed_to[step.rows] = step.ends
        hidden = self._ops.tensor(step.hidden)
        last = hidden.index_select(0, self._index(step.cu_tokens[1:] - 1))
        self._last[self._index(step.rows)] = last

    def _of_rows(self, held: torch.Tensor, rows: Int32Array) -> Array:
        """Rows of what is held for every request."""
        return self._ops.view(held.index_select(0, self._index(rows)))

    def _index(self, numbers: Int32Array | Int64Array) -> torch.Tensor:
        """Row numbers where the hidden states are."""
        return torch.from_numpy(numbers).to(self._ops.device, torch.long)

    @abstractmethod
    def _is_ready(self, batch: DraftRound) -> BoolArray:
        """``bool[B]``: which rows can be drafted for."""

    @abstractmethod
    def _expand_roots(self, batch: DraftRound, frontier: Frontier) -> Array:
        """The head's output for the roots of the frontier."""

    @abstractmethod
    def _expand(self, batch: DraftRound, frontier: Frontier, hidden: Array) -> Array:
        """The head's output for nodes whose parents' is ``hidden``, normalised, ``[Q, hidden]``."""


def children_of(logits: torch.Tensor, topk: int) -> tuple[Int64Array, FloatArray]:
    """The likeliest tokens of ``[Q, V]`` and their log probabilities, best first; ``[Q, topk]``.

    Of one child only whether it is finite matters: its log probability is 0 or NaN.
    """
    if topk == 1:
        best = logits.argmax(dim=-1, keepdim=True)
        logprobs = logits.gather(1, best) * 0.0
        return best.cpu().numpy(), logprobs.cpu().numpy()
    values, ids = logits.topk(min(topk, logits.shape[-1]), dim=-1)
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    return ids.cpu().numpy(), logprobs.double().cpu().numpy()

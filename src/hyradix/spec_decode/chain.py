"""Chains of drafts: a beam of width one, without the bookkeeping that a beam needs.

Owns: the tokens of B chains that grow together. Does not know: models, rows, slots.
Invariant: the same drafts as ``beam.Beam`` with topk 1 (a test compares the two).
Read next: ``beam.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hyradix.request import Int32Array
from hyradix.spec_config import DraftShape
from hyradix.spec_decode.beam import FloatArray, Frontier
from hyradix.spec_decode.drafts import Drafts


class Chains:
    """Call ``frontier`` and ``grow`` in turn, then ``finish``, as of a ``Beam``."""

    def __init__(
        self, roots: Int32Array, max_nodes: Int32Array, max_depth: Int32Array, shape: DraftShape
    ) -> None:
        """roots, max_nodes, max_depth: ``int32[B]``; the shape bounds the last two."""
        limits = np.minimum(np.minimum(max_nodes, shape.nodes) - 1, max_depth)
        self._limits = np.minimum(limits, shape.steps)
        self._deepest = int(self._limits.max(initial=0))
        self._tokens = np.zeros((len(roots), self._deepest + 1), np.int32)
        self._tokens[:, 0] = roots
        self._active = np.arange(len(roots))
        self._depth = -1

    def frontier(self) -> Frontier | None:
        """The ends that grow on; None when none does."""
        self._depth += 1
        goes_on = self._limits[self._active] > self._depth
        parents = np.flatnonzero(goes_on)
        if len(parents) == 0:
            return None
        self._active = self._active[parents]
        path = np.arange(self._depth + 1, dtype=np.int32)
        return Frontier(
            self._depth,
            self._active,
            self._tokens[self._active, self._depth],
            parents,
            np.broadcast_to(path, (len(parents), len(path))),
        )

    def grow(self, token_ids: npt.NDArray[np.integer[Any]], logprobs: FloatArray) -> None:
        """The next token of each: ``[Q, 1]``. One that is not a probability ends its chain."""
        self._tokens[self._active, self._depth + 1] = token_ids[:, 0]
        is_none = ~(logprobs[:, 0] > -np.inf)
        self._limits[self._active[is_none]] = self._depth

    def finish(self) -> Drafts:
        """Every chain, its root first."""
        counts = np.maximum(self._limits, 0) + 1
        cu_nodes = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=cu_nodes[1:])
        is_node = np.arange(self._deepest + 1) < counts[:, None]
        parents = np.broadcast_to(np.arange(-1, self._deepest, dtype=np.int32), is_node.shape)
        return Drafts(cu_nodes, self._tokens[is_node], parents[is_node])

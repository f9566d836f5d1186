"""The beam that grows draft trees: which nodes are expanded next, which are kept.

Owns: candidates, their cumulative probabilities, the scratch places of expanded nodes.
Does not know: models, rows, slots.

Invariants:
- Each step expands the best topk nodes of the last one by topk children each; the T-1 best of all
  candidates are kept. A child is never likelier than its parent and made after it, and equal ones
  stand in the order in which they were made: so what is kept is closed under parents.
- A node that can no longer be kept together with a child is not expanded: this changes no result.
- Places: an expanded node keeps its place as long as a kept node may descend from it. Such nodes
  are at most T-1 with the root, so places 0 (the root's) to T-2 suffice.
Source: DESIGN section 6. Read next: ``mtp.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hyradix.request import Int32Array, Int64Array
from hyradix.spec_config import DraftShape
from hyradix.spec_decode.drafts import Drafts

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Q nodes to be expanded now, all of depth ``depth``, tree by tree.

    trees: ``int64[Q]``. token_ids: ``int32[Q]``. parents: ``int64[Q]``: which node of the frontier
    before is the parent (0 at depth 0). paths: ``int32[Q, depth+1]``: the places of its path, the
    root's first, its own last.
    """

    depth: int
    trees: Int64Array
    token_ids: Int32Array
    parents: Int64Array
    paths: Int32Array


class Beam:
    """B trees that grow together. Call ``frontier`` and ``grow`` in turn, then ``finish``."""

    def __init__(
        self, roots: Int32Array, max_nodes: Int32Array, max_depth: Int32Array, shape: DraftShape
    ) -> None:
        """roots, max_nodes, max_depth: ``int32[B]``; the shape bounds the last two."""
        size = (len(roots), shape.beam_nodes)
        self._topk = shape.topk
        self._num_kept = np.minimum(max_nodes, shape.nodes)[:, None] - 1
        self._max_depth = np.minimum(max_depth, shape.steps)[:, None]
        self._tokens = np.zeros(size, np.int32)
        self._tokens[:, 0] = roots
        self._parents = np.full(size, -1, np.int64)
        self._scores = np.full(size, -np.inf)
        self._scores[:, 0] = 0.0
        self._origins = np.zeros(size, np.int64)  # of a candidate: its parent in the last frontier
        self._places = np.zeros(size, np.int32)
        self._at_place = np.full((len(roots), shape.nodes), -1, np.int64)
        self._depth = -1
        self._first, self._last = 0, 1  # candidates of the last step
        self._expanded: tuple[Int64Array, Int64Array, Int64Array] = (_NONE, _NONE, _NONE)

    def frontier(self) -> Frontier | None:
        """The nodes to expand now; None when the trees are as deep as they may be."""
        self._depth += 1
        ranks = self._ranks()[1]
        best = np.argsort(-self._scores[:, self._first : self._last], axis=1, kind="stable")
        nodes = best[:, : self._topk] + self._first
        is_used = np.take_along_axis(ranks, nodes, 1) < self._num_kept
        is_used &= np.take_along_axis(self._scores, nodes, 1) > -np.inf
        is_used &= self._depth < self._max_depth
        trees, order = is_used.nonzero()
        if not len(trees):
            return None
        chosen = nodes[trees, order]
        self._expanded = (trees, order, chosen)
        self._take_places(ranks, trees, chosen)
        return Frontier(
            self._depth,
            trees,
            self._tokens[trees, chosen],
            self._origins[trees, chosen],
            self._paths(trees, chosen),
        )

    def grow(self, token_ids: npt.NDArray[np.integer[Any]], logprobs: FloatArray) -> None:
        """Children of the nodes of the last frontier: ``[Q, topk]`` or fewer, best first.

        What is not a probability (NaN, of a row whose logits were not finite) is no child.
        """
        trees, order, nodes = self._expanded
        scores = self._scores[trees, nodes][:, None] + logprobs
        width = min(self._topk, self._last - self._first) * self._topk
        columns = self._last + order[:, None] * self._topk + np.arange(token_ids.shape[1])
        at = (trees[:, None], columns)
        self._tokens[at] = token_ids
        self._parents[at] = nodes[:, None]
        self._origins[at] = np.arange(len(trees))[:, None]
        self._scores[at] = np.where(np.isnan(scores), -np.inf, scores)
        self._first, self._last = self._last, self._last + width

    def finish(self) -> Drafts:
        """The best of each tree, best first."""
        order, ranks = self._ranks()
        counts = (self._scores[:, : self._last] > -np.inf).sum(1, keepdims=True)
        counts = np.minimum(counts, np.maximum(self._num_kept, 0) + 1)
        is_kept = np.arange(self._last) < counts
        above = np.take_along_axis(self._parents, order, 1)
        parents = np.take_along_axis(ranks, np.maximum(above, 0), 1)
        parents[:, 0] = -1
        cu_nodes = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=cu_nodes[1:])
        tokens = np.take_along_axis(self._tokens, order, 1)
        return Drafts(cu_nodes, tokens[is_kept], parents[is_kept].astype(np.int32))

    def _ranks(self) -> tuple[Int64Array, Int64Array]:
        """Candidates from the best on, and the rank of each; the root is first."""
        order = np.argsort(-self._scores[:, : self._last], axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(order.shape[1])[None], 1)
        return order, ranks

    def _take_places(self, ranks: Int64Array, trees: Int64Array, nodes: Int64Array) -> None:
        """Give the new nodes the lowest places that no living node has."""
        holders = np.maximum(self._at_place, 0)
        is_living = np.take_along_axis(ranks, holders, 1) < self._num_kept
        is_living &= self._at_place >= 0
        free = np.argsort(is_living, axis=1, kind="stable")
        first = np.searchsorted(trees, trees)  # of the own tree: trees are ascending
        places = free[trees, np.arange(len(trees)) - first]
        self._at_place[trees, places] = nodes
        self._places[trees, nodes] = places

    def _paths(self, trees: Int64Array, nodes: Int64Array) -> Int32Array:
        paths = np.empty((len(trees), self._depth + 1), np.int32)
        for depth in range(self._depth, -1, -1):
            paths[:, depth] = self._places[trees, nodes]
            nodes = self._parents[trees, nodes]
        return paths


_NONE: Int64Array = np.zeros(0, np.int64)

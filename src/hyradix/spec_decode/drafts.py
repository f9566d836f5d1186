"""The draft trees of one round, one after the other.

Owns: ``Drafts``. Does not know: who proposed them, slots, logits.
Invariants: node 0 of each tree is its root (the token that was sampled last and is not consumed
yet); parents precede children.
Read next: ``beam.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyradix.request import Int32Array


@dataclass(frozen=True, slots=True)
class Drafts:
    """B trees with ``total`` nodes.

    cu_nodes: ``int32[B+1]``. token_ids: ``int32[total]``. parents: ``int32[total]`` node numbers
    within the own tree, -1 at a root. The likelier nodes come first: a tree cut after any of its
    nodes is the best one of that size.
    """

    cu_nodes: Int32Array
    token_ids: Int32Array
    parents: Int32Array

    @property
    def num_nodes(self) -> Int32Array:
        """``int32[B]`` nodes of each tree, the root included."""
        return np.diff(self.cu_nodes)

    @property
    def is_empty(self) -> bool:
        """Whether every tree is its root alone."""
        return len(self.token_ids) == len(self.cu_nodes) - 1

    @classmethod
    def of(cls, trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Drafts:
        """From (token ids, parents) of each tree."""
        tokens = [token for ids, _ in trees for token in ids]
        if len(tokens) == len(trees):
            return cls.roots(np.array(tokens, np.int32))
        cu_nodes = np.zeros(len(trees) + 1, np.int32)
        np.cumsum([len(parents) for _, parents in trees], out=cu_nodes[1:])
        above = [parent for _, parents in trees for parent in parents]
        return cls(cu_nodes, np.array(tokens, np.int32), np.array(above, np.int32))

    @classmethod
    def roots(cls, token_ids: Int32Array) -> Drafts:
        """Trees that are their root alone."""
        num_trees = len(token_ids)
        cu_nodes = np.arange(num_trees + 1, dtype=np.int32)
        return cls(cu_nodes, token_ids.astype(np.int32), np.full(num_trees, -1, np.int32))

    def take(self, index: Int32Array) -> Drafts:
        """The trees ``index``, in that order."""
        return Drafts._join([self._tree(i) for i in index.tolist()])

    def spread(self, places: Int32Array, roots: Int32Array) -> Drafts:
        """As many trees as ``roots``: these at ``places`` (ascending), elsewhere a root alone."""
        alone = Drafts.roots(roots)
        own = {place: i for i, place in enumerate(places.tolist())}
        return Drafts._join(
            [self._tree(own[i]) if i in own else alone._tree(i) for i in range(len(roots))]
        )

    def _tree(self, i: int) -> tuple[Int32Array, Int32Array]:
        part = slice(int(self.cu_nodes[i]), int(self.cu_nodes[i + 1]))
        return self.token_ids[part], self.parents[part]

    @classmethod
    def _join(cls, trees: list[tuple[Int32Array, Int32Array]]) -> Drafts:
        cu_nodes = np.zeros(len(trees) + 1, np.int32)
        np.cumsum([len(parents) for _, parents in trees], out=cu_nodes[1:])
        tokens, parents = zip(*trees, strict=True)
        return cls(cu_nodes, np.concatenate(tokens), np.concatenate(parents))

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

    @classmethod
    def of(cls, trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Drafts:
        """From (token ids, parents) of each tree."""
        cu_nodes = np.zeros(len(trees) + 1, np.int32)
        np.cumsum([len(parents) for _, parents in trees], out=cu_nodes[1:])
        tokens = [token for ids, _ in trees for token in ids]
        above = [parent for _, parents in trees for parent in parents]
        return cls(cu_nodes, np.array(tokens, np.int32), np.array(above, np.int32))

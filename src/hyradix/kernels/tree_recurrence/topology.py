"""Draft trees as parent tables: checked once, described once a step, used by every layer.

Owns: what a parent table means, and what follows from it (depths, ancestors, paths).
Does not know: tokens, states, requests.

Invariants:
- Node 0 is the root, parents[0] = -1; every parent precedes its child; ``PAD`` nodes come last and
  have no children. So ancestors have smaller numbers, and a path in ascending order is root first.
- T counts the root: a chain of k drafts has k+1 nodes.
Source: DESIGN section 6. Read next: ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROOT = -1
PAD = -2


@dataclass(frozen=True, slots=True)
class Tree:
    """The draft trees of N requests, T nodes each; as ``describe`` returns it.

    parents: ``int64[N, T]``, ``PAD`` where there is no node. depths: ``int64[N, T]``, 0 at the
    root, -1 at padding. ancestors: ``bool[N, T, T]``: row i is the path of node i, itself included;
    all False at padding. max_depth: the deepest node of all.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int

    @property
    def is_node(self) -> torch.Tensor:
        """``bool[N, T]``: False at padding."""
        return self.parents != PAD


def describe(parents: torch.Tensor) -> Tree:
    """Everything that layers need of ``int[N, T]`` parents.

    Raises: ``ValueError`` as ``check_parents``. Cost: once a step, a read of ``parents`` on the
    host; not once a layer.
    """
    for row in parents.tolist():
        check_parents(row)
    parents = parents.long()
    num_rows, num_nodes = parents.shape
    itself = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
    ancestors = torch.zeros(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
    rows = torch.arange(num_rows, device=parents.device)
    for node in range(num_nodes):
        parent = parents[:, node]
        path = ancestors[rows, parent.clamp(min=0)] & (parent >= 0).unsqueeze(1)
        ancestors[:, node] = (path | itself[node]) & (parent != PAD).unsqueeze(1)
    depths = ancestors.sum(2) - 1
    return Tree(parents, depths, ancestors, int(depths.max()))


def check_parents(parents: Sequence[int]) -> None:
    """Raises ``ValueError`` naming the node at fault where ``parents`` is no tree."""
    if not parents or parents[0] != ROOT:
        raise ValueError(f"node 0 is the root: parents[0] must be -1, got {list(parents[:1])}")
    num_nodes = len(parents)
    for node in range(1, num_nodes):
        parent = parents[node]
        if parent == PAD:
            num_nodes = min(num_nodes, node)
        elif node > num_nodes:
            raise ValueError(f"node {node} follows padding: padded nodes come last")
        elif not 0 <= parent < node:
            raise ValueError(
                f"parents[{node}] is {parent}: a parent precedes its child (0 to {node - 1}; "
                f"{PAD} for padding)"
            )


def chain_parents(num_nodes: int, *, padded_to: int = 0) -> list[int]:
    """Parents of a chain of ``num_nodes``, its root included."""
    return list(range(-1, num_nodes - 1)) + [PAD] * (padded_to - num_nodes)


def check_chain(parents: Sequence[int]) -> None:
    """Raises ``ValueError`` where some node (padding apart) does not continue the one before it."""
    check_parents(parents)
    for node, parent in enumerate(parents):
        if parent not in (node - 1, PAD):
            raise ValueError(
                f"this needs a chain (topk 1), but parents[{node}] is {parent}, not {node - 1}"
            )


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included. Raises ``ValueError`` for a padded node."""
    if not 0 <= node < len(parents) or parents[node] == PAD:
        raise ValueError(f"there is no node {node}")
    nodes = [node]
    while (node := parents[node]) != ROOT:
        nodes.append(node)
    return nodes[::-1]


def paths(tree: Tree, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The path to one node of each request: nodes, root first, and how many there are.

    last: ``int64[N]``. Returns ``int64[N, max_depth+1]`` (what stands past a count is on no path)
    and counts ``int64[N]``.
    """
    rows = torch.arange(last.shape[0], device=last.device)
    on_path = tree.ancestors[rows, last]
    order = on_path.long().argsort(dim=1, descending=True, stable=True)
    return order[:, : tree.max_depth + 1], on_path.sum(1)

"""Reads the radix tree the way a person would draw it, so that tests name shapes, not attributes.

Owns: nothing. Knows of the tree only ``roots()`` and the public fields of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hyradix.cache.node import Node, StateRef, new_hasher
from hyradix.cache.policy import make_policy
from hyradix.cache.tree import RadixTree
from hyradix.request import Namespace

NOBODY = Namespace()

Shape = tuple[int, "int | None", tuple["Shape", ...]]
"""(tokens of the segment, state slot or None, children: longest segment first)."""


def new_tree() -> RadixTree:
    """An empty tree under the plain policy."""
    return RadixTree(make_policy("lru"))


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as a key."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def slots(*numbers: int) -> np.ndarray:
    """KV slot numbers as the tree takes them."""
    return np.array(numbers, dtype=np.int32)


def span(first: int, last: int) -> np.ndarray:
    """KV slots first..last, both included."""
    return np.arange(first, last + 1, dtype=np.int32)


def state_ref(
    slot: int, tokens: Sequence[int], namespace: Namespace = NOBODY, *, step: int = 0
) -> StateRef:
    """A reference to the state that has consumed exactly ``tokens``."""
    hasher = new_hasher(namespace)
    hasher.update(pack(tokens))
    return StateRef(slot, len(tokens), int(hasher.intdigest()), step)


def path(tree: RadixTree, tokens: Sequence[int], namespace: Namespace = NOBODY) -> Iterator[Node]:
    """The nodes that ``tokens`` run through, as far as whole segments agree."""
    node, key, at = tree.roots().get(namespace), pack(tokens), 0
    while node is not None:
        node = node.children.get(key[at : at + 4])
        if node is None or key[at : at + len(node.key)] != node.key:
            return
        at += len(node.key)
        yield node


def states_along(
    tree: RadixTree, tokens: Sequence[int], namespace: Namespace = NOBODY
) -> dict[int, int]:
    """Depth -> state slot of every checkpoint on the path of ``tokens``."""
    return {n.depth: n.state.slot for n in path(tree, tokens, namespace) if n.state is not None}


def depths_along(
    tree: RadixTree, tokens: Sequence[int], namespace: Namespace = NOBODY
) -> list[int]:
    """Depths of the checkpoints on the path of ``tokens``."""
    return sorted(states_along(tree, tokens, namespace))


def kv_along(tree: RadixTree, tokens: Sequence[int], namespace: Namespace = NOBODY) -> list[int]:
    """KV slots of the whole segments on the path of ``tokens``."""
    return [int(s) for node in path(tree, tokens, namespace) for s in node.kv_slots]


def node_at(
    tree: RadixTree, tokens: Sequence[int], depth: int, namespace: Namespace = NOBODY
) -> Node:
    """The node that ends at ``depth`` on the path of ``tokens``."""
    for node in path(tree, tokens, namespace):
        if node.depth == depth:
            return node
    raise AssertionError(f"no node ends at {depth}")


def segments(tree: RadixTree, tokens: Sequence[int], namespace: Namespace = NOBODY) -> list[int]:
    """Lengths of the segments on the path of ``tokens``."""
    return [node.num_tokens for node in path(tree, tokens, namespace)]


def shape(tree: RadixTree, namespace: Namespace = NOBODY) -> tuple[Shape, ...]:
    """The whole tree of a namespace; () when there is none."""
    root = tree.roots().get(namespace)
    return () if root is None else _children(root)


def _children(node: Node) -> tuple[Shape, ...]:
    parts = (
        (c.num_tokens, None if c.state is None else c.state.slot, _children(c))
        for c in node.children.values()
    )
    return tuple(sorted(parts, key=lambda s: -s[0]))


def all_states(tree: RadixTree) -> set[int]:
    """Every state slot that the tree owns."""
    return {node.state.slot for node in tree.nodes() if node.state is not None}

"""Which state and which KV leaf go next.

Owns: the order of eviction. Does not know: slots, allocators, rows.
Invariants: a victim is alive and unlocked; states and KV are two independent orders; the cost of
finding a victim does not grow with the number of nodes (lazy heaps: O(log n)).
Read next: ``tree.py``, which offers nodes and takes victims.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from hyradix.cache.node import Node

Priority = int
"""Least goes first. One integer: heaps compare it at memory speed."""

_WITH_STATE = 1 << 60


class EvictionPolicy(Protocol):
    """The tree offers a node whenever it becomes evictable or its worth changes."""

    def offer_state(self, node: Node) -> None:
        """``node`` has a state that no lock protects."""
        ...

    def offer_kv(self, node: Node) -> None:
        """``node`` is an unlocked leaf."""
        ...

    def take_state(self) -> Node | None:
        """The node whose state goes next; None when there is none."""
        ...

    def take_kv(self) -> Node | None:
        """The leaf that goes next; None when there is none."""
        ...


class _LazyHeap:
    """A priority queue whose entries may be stale; they are checked when they surface."""

    def __init__(self, priority: Callable[[Node], Priority | None]) -> None:
        self._priority = priority
        self._heap: list[tuple[Priority, int, Node]] = []
        self._live_hint = 0

    def offer(self, node: Node) -> None:
        priority = self._priority(node)
        if priority is not None:
            heapq.heappush(self._heap, (priority, node.node_id, node))
            if len(self._heap) > 2 * self._live_hint + 64:
                self._rebuild()

    def take(self) -> Node | None:
        while self._heap:
            priority, _, node = heapq.heappop(self._heap)
            if self._priority(node) == priority:
                return node
        return None

    def _rebuild(self) -> None:
        """Drop stale and repeated entries; amortised over the offers that made them."""
        live = {id(node): node for p, _, node in self._heap if self._priority(node) == p}
        self._heap = [(self._require(node), node.node_id, node) for node in live.values()]
        heapq.heapify(self._heap)
        self._live_hint = len(self._heap)

    def _require(self, node: Node) -> Priority:
        priority = self._priority(node)
        assert priority is not None
        return priority


def _state_priority(node: Node) -> Priority | None:
    if node.state is None or node.state_lock or node.parent is None:
        return None
    return node.state_last_use


def _kv_priority(node: Node) -> Priority | None:
    """Stateless leaves first: they save nobody any compute."""
    if node.parent is None or node.children or node.kv_lock:
        return None
    return node.last_use if node.state is None else node.last_use + _WITH_STATE


class LRUPolicy:
    """Least recently used, states and KV apart; tombstone leaves go first."""

    def __init__(self) -> None:
        self._states = _LazyHeap(_state_priority)
        self._kv = _LazyHeap(_kv_priority)

    def offer_state(self, node: Node) -> None:
        """See ``EvictionPolicy``."""
        self._states.offer(node)

    def offer_kv(self, node: Node) -> None:
        """See ``EvictionPolicy``."""
        self._kv.offer(node)

    def take_state(self) -> Node | None:
        """See ``EvictionPolicy``."""
        return self._states.take()

    def take_kv(self) -> Node | None:
        """See ``EvictionPolicy``."""
        return self._kv.take()


def make_policy(name: str) -> EvictionPolicy:
    """The policy called ``name`` (checked by ``config``)."""
    return {"lru": LRUPolicy}[name]()

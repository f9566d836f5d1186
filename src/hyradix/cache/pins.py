"""Prefixes that are kept for good: those of warm-up prompts under ``--pin``.

Owns: receipts that nobody gives back. Does not know: who asked for them.
Invariant: a pin never takes the last state that a running request could need.
Read next: ``prefix_cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hyradix.cache.node import TOKEN_BYTES, Node, Receipt
from hyradix.cache.tree import RadixTree
from hyradix.config import EngineConfig
from hyradix.request import Namespace


@dataclass(slots=True)
class Pins:
    """See the module's docstring."""

    config: EngineConfig
    tree: RadixTree
    receipts: list[Receipt] = field(default_factory=list)

    def pin(self, namespace: Namespace, tokens: bytes, depth: int) -> None:
        """Keep ``tokens[:depth]`` and its state, if states enough are left for requests."""
        if self.config.num_states - len(self.receipts) - 1 < self.config.max_requests:
            return
        match = self.tree.match_prefix(namespace, tokens, limit=depth)
        if match.num_cached_tokens == depth:
            self.receipts.append(self.tree.lock(match))

    def num_elsewhere(self, namespace: Namespace, tokens: bytes) -> int:
        """KV slots that are pinned for good and of no use to a request with these tokens."""
        if not self.receipts:
            return 0
        nodes: dict[int, Node] = {}
        for receipt in self.receipts:
            node = receipt.kv_node
            while node is not None and node.parent is not None:
                nodes[node.node_id] = node
                node = node.parent
        match = self.tree.match_prefix(namespace, tokens, limit=len(tokens) // TOKEN_BYTES)
        node = match.kv_node
        while node is not None:
            if node.depth <= match.num_kv_tokens:
                nodes.pop(node.node_id, None)
            node = node.parent
        return sum(node.num_tokens for node in nodes.values())

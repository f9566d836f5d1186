"""The radix tree: attention KV and recurrent states of all known prefixes, side by side.

Owns: nodes, their locks and recencies. Does not know: allocators, rows, requests. Slots that
leave the tree are returned to the caller, who gives them back to their allocator.

Invariants (``invariants.check_tree`` proves them):
- a state is a point value at its node's end: depth and digest agree;
- state_lock > 0 implies kv_lock > 0; a child's kv_lock never exceeds its parent's;
- ``num_tokens``, ``num_locked_tokens``, ``num_states``, ``num_locked_states`` are exact;
- ``match_prefix`` changes nothing; splits happen in ``lock`` and ``insert`` only, and keep the
  old object as the lower node, so receipts stay valid.
Source: DESIGN section 3. Read next: ``prefix_cache.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hyradix.cache.fates import Fates
from hyradix.cache.node import (
    EMPTY_SLOTS,
    TOKEN_BYTES,
    InsertResult,
    Match,
    Node,
    Receipt,
    StateRef,
    new_hasher,
)
from hyradix.cache.policy import EvictionPolicy
from hyradix.request import Int32Array, MissReason, Namespace


def common_prefix(a: bytes, b: bytes) -> int:
    """Number of equal leading tokens of two int32 buffers. Memory speed."""
    count = min(len(a), len(b)) // TOKEN_BYTES
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    if a[: count * TOKEN_BYTES] == b[: count * TOKEN_BYTES]:
        return count
    left = np.frombuffer(a, dtype="<i4", count=count)
    right = np.frombuffer(b, dtype="<i4", count=count)
    return int(np.argmax(left != right))


class RadixTree:
    """See the module's docstring. Tokens are ``bytes``: little-endian int32."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._roots: dict[Namespace, Node] = {}
        self._namespaces: dict[int, Namespace] = {}
        self._clock = 0
        self._next_id = 0
        self.version = 0
        self.fates = Fates()
        self.num_tokens = 0
        self.num_locked_tokens = 0
        self.num_states = 0
        self.num_locked_states = 0

    # ---- match ----------------------------------------------------------------------------------

    def match_prefix(self, namespace: Namespace, tokens: bytes, *, limit: int) -> Match:
        """The deepest KV and the deepest state for ``tokens[:limit]``. Changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            reason = self._fate_below(namespace, None, tokens, limit)
            return Match(namespace, self.version, reason=reason or MissReason.COLD)
        node, offset, state_node, parts = self._walk(root, tokens, limit * TOKEN_BYTES)
        depth = node.depth - node.num_tokens + offset
        cached = state_node.depth if state_node is not None else 0
        return Match(
            namespace=namespace,
            version=self.version,
            num_kv_tokens=depth,
            num_cached_tokens=cached,
            kv_node=node,
            kv_offset=offset,
            state_node=state_node,
            kv_slots=np.concatenate(parts) if parts else EMPTY_SLOTS,
            reason=self._miss_reason(namespace, node, offset, cached, tokens, limit),
        )

    def _walk(
        self, root: Node, tokens: bytes, end: int
    ) -> tuple[Node, int, Node | None, list[Int32Array]]:
        """Down from ``root`` along ``tokens[:end]`` (bytes): node, offset in it, state, slots."""
        node, pos, state_node = root, 0, None
        parts: list[Int32Array] = []
        while pos < end:
            child = node.children.get(tokens[pos : pos + TOKEN_BYTES])
            if child is None:
                break
            stop = pos + len(child.key)
            if stop > end or tokens[pos:stop] != child.key:
                offset = common_prefix(child.key, tokens[pos : min(stop, end)])
                parts.append(child.kv_slots[:offset])
                return child, offset, state_node, parts
            node, pos = child, stop
            parts.append(child.kv_slots)
            if child.state is not None:
                state_node = child
        return node, node.num_tokens, state_node, parts

    def _miss_reason(
        self, namespace: Namespace, node: Node, offset: int, cached: int, tokens: bytes, limit: int
    ) -> MissReason:
        """Why computing resumes at ``cached`` although KV reaches deeper (or nothing is there)."""
        depth = node.depth - node.num_tokens + offset
        if limit == 0 and tokens[:TOKEN_BYTES] in node.children:
            return MissReason.BEYOND_LAST
        whole = offset == node.num_tokens
        above: Node | None = node if whole else node.parent
        if depth == cached:
            if depth < limit:
                reason = self._fate_below(namespace, above, tokens, limit)
                if reason is not None:
                    return reason
            return MissReason.NONE if depth else MissReason.COLD
        if not whole:
            reason = self._fate_below(namespace, above, tokens, depth)
            if reason is not None:
                return reason
        while above is not None and above.depth > cached:
            reason = self.fates.reason(namespace, above.depth, above.digest)
            if reason is not None:
                return reason
            above = above.parent
        return MissReason.BEYOND_LAST if depth == limit else MissReason.NEVER_PLACED

    def _fate_below(
        self, namespace: Namespace, above: Node | None, tokens: bytes, depth: int
    ) -> MissReason | None:
        """What is remembered of ``tokens[:depth]``, which goes on from the node ``above``.

        Cost: nothing is hashed unless something is remembered at that depth.
        """
        if not self.fates.has_any(depth):
            return None
        hasher = new_hasher(namespace) if above is None else above.hasher.copy()
        start = 0 if above is None else above.depth
        hasher.update(tokens[start * TOKEN_BYTES : depth * TOKEN_BYTES])
        return self.fates.reason(namespace, depth, int(hasher.intdigest()))

    # ---- locks ----------------------------------------------------------------------------------

    def lock(self, match: Match) -> Receipt:
        """Protect what ``match`` found: its KV path, and the state it resumes from.

        Splits where the match ends inside a node. ``touch`` it once the lock is put to use.
        """
        assert match.version == self.version, "the tree changed since this match was made"
        node = match.kv_node
        if node is None:
            node = self._root(match.namespace)
        elif match.kv_offset < node.num_tokens:
            node = self._split(node, match.kv_offset)
        self._lock_path(node, None)
        state_node = match.state_node
        if state_node is not None:
            if state_node.state_lock == 0:
                self.num_locked_states += 1
            state_node.state_lock += 1
        return Receipt(node, state_node)

    def touch(self, receipt: Receipt) -> None:
        """A hit refreshes what is resumed from, not its ancestors."""
        assert receipt.kv_node is not None
        receipt.kv_node.last_use = self._tick()
        if receipt.state_node is not None:
            receipt.state_node.state_last_use = self._tick()
            receipt.state_node.uses += 1

    def advance(self, receipt: Receipt, node: Node) -> None:
        """Move a KV receipt down to ``node``, a descendant of (or the same as) its node."""
        assert receipt.kv_node is not None
        self._lock_path(node, receipt.kv_node)
        node.last_use = self._tick()
        receipt.kv_node = node

    def unlock_state(self, receipt: Receipt) -> None:
        """Give the state lock back (the batch that holds the copy is sealed)."""
        node, receipt.state_node = receipt.state_node, None
        if node is None:
            return
        assert node.state_lock > 0, "state unlocked twice"
        node.state_lock -= 1
        if node.state_lock == 0:
            self.num_locked_states -= 1
            self._policy.offer_state(node)

    def unlock_kv(self, receipt: Receipt) -> None:
        """Give the KV lock back; the receipt is void afterwards."""
        self.unlock_state(receipt)
        node, receipt.kv_node = receipt.kv_node, None
        assert node is not None, "KV unlocked twice"
        bottom = node
        while True:
            assert node.kv_lock > 0, "KV lock count below zero"
            node.kv_lock -= 1
            if node.kv_lock == 0:
                self.num_locked_tokens -= node.num_tokens
            if node.parent is None:
                break
            node = node.parent
        self._settle(bottom)
        self._drop_if_empty(node)

    def _lock_path(self, node: Node, above: Node | None) -> None:
        """Count one lock on every node from ``node`` up to, but without, ``above``."""
        at: Node | None = node
        while at is not above:
            assert at is not None, "the receipt's node is not an ancestor"
            if at.kv_lock == 0:
                self.num_locked_tokens += at.num_tokens
            at.kv_lock += 1
            at = at.parent

    # ---- insert ---------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Namespace,
        tokens: bytes,
        kv_slots: Int32Array,
        state: StateRef | None,
        *,
        protected_len: int,
        start: Node | None = None,
    ) -> InsertResult:
        """Learn ``tokens[:d]`` with its KV (d = len(kv_slots)), and the state at d if given.

        Where the tree already holds tokens past ``protected_len``, the caller's slots there are
        returned as duplicates and the tree's as replacements; a slot that is the tree's is never
        returned. ``start``: a node known to be on the path (a receipt's), to walk from.
            caller  |--protected--|--held by the tree: duplicates--|--new: the tree takes them--|
        Cost: two memory compares a node of the walk.
        """
        assert len(tokens) >= TOKEN_BYTES * len(kv_slots)
        node = start if start is not None else self._root(namespace)
        begin = pos = node.depth * TOKEN_BYTES
        end = len(kv_slots) * TOKEN_BYTES
        assert pos <= end
        mine = kv_slots[node.depth :].tobytes()
        replaced: list[tuple[int, Int32Array]] = []
        while pos < end:
            child = node.children.get(tokens[pos : pos + TOKEN_BYTES])
            if child is None:
                node = self._append(node, tokens[pos:end], kv_slots[pos // TOKEN_BYTES :])
                break
            stop = pos + len(child.key)
            if stop > end or tokens[pos:stop] != child.key:
                same = common_prefix(child.key, tokens[pos : min(stop, end)])
                if same < child.num_tokens:
                    child = self._split(child, same)
                stop = pos + len(child.key)
            if mine[pos - begin : stop - begin] != child.kv_slots.tobytes():
                replaced.append((pos // TOKEN_BYTES, child.kv_slots))
            node, pos = child, stop
        is_kept = state is not None and self._attach(namespace, node, state)
        return InsertResult(
            node=node,
            replaced=tuple(replaced),
            duplicates=_duplicates(kv_slots, replaced, protected_len),
            is_state_kept=is_kept,
        )

    def _append(self, parent: Node, key: bytes, kv_slots: Int32Array) -> Node:
        hasher = parent.hasher.copy()
        hasher.update(key)
        node = Node(self._new_id(), parent, key, kv_slots.copy(), hasher)
        node.last_use = self._tick()
        parent.children[node.key[:TOKEN_BYTES]] = node
        self.num_tokens += node.num_tokens
        self.version += 1
        self._policy.offer_kv(node)
        return node

    def _attach(self, namespace: Namespace, node: Node, state: StateRef) -> bool:
        assert node.parent is not None, "the empty prefix has no checkpoint"
        assert state.depth == node.depth, f"state at {state.depth} put on a node at {node.depth}"
        assert state.digest == node.digest, "state and node belong to different prefixes"
        node.state_last_use = self._tick()
        if node.state is not None:
            node.uses += 1  # two came to the same point: it is worth more than either knew
            self._policy.offer_state(node)
            return False
        node.state = state
        self.num_states += 1
        self.version += 1
        self.fates.forget(namespace, node.depth, node.digest)
        self._policy.offer_state(node)
        self._policy.offer_kv(node)
        return True

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` of its tokens; returns the NEW upper node.

        before  parent --[ key: a|b ] state, locks
        after   parent --[ a ] kv_lock --[ b ] state, locks
        """
        parent = node.parent
        assert parent is not None
        assert 0 < at < node.num_tokens
        cut = at * TOKEN_BYTES
        hasher = parent.hasher.copy()
        hasher.update(node.key[:cut])
        upper = Node(self._new_id(), parent, node.key[:cut], node.kv_slots[:at].copy(), hasher)
        upper.kv_lock = node.kv_lock
        upper.last_use = node.last_use
        parent.children[upper.key[:TOKEN_BYTES]] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.kv_slots = node.kv_slots[at:].copy()
        upper.children[node.key[:TOKEN_BYTES]] = node
        self.version += 1
        return upper

    # ---- evict ----------------------------------------------------------------------------------

    @property
    def num_evictable_tokens(self) -> int:
        """KV slots that eviction could free now (children's locks never exceed parents')."""
        return self.num_tokens - self.num_locked_tokens

    @property
    def num_evictable_states(self) -> int:
        """State slots that eviction could free now."""
        return self.num_states - self.num_locked_states

    def evict_state(self) -> int | None:
        """Turn the least valuable unlocked state's node into a tombstone; its slot, or None."""
        node = self._policy.take_state()
        if node is None:
            return None
        return self.take_state(node, MissReason.EVICTED)

    def take_state(self, node: Node, reason: MissReason | None) -> int:
        """Take the state off ``node`` (evicted, superseded or moved); returns its slot."""
        state = node.state
        assert state is not None
        assert node.state_lock == 0, "a locked state is never taken"
        node.state = None
        self.num_states -= 1
        self.version += 1
        if reason is not None:
            self.fates.note(self._namespace_of(node), node.depth, node.digest, reason)
        self._policy.offer_kv(node)
        return state.slot

    def move_state(self, receipt: Receipt) -> int | None:
        """Take the state that ``receipt`` alone holds off the tree; its slot, or None if shared."""
        node = receipt.state_node
        if node is None or node.state_lock > 1:
            return None
        self.unlock_state(receipt)
        return self.take_state(node, MissReason.EVICTED)

    def evict_kv(self, count: int) -> tuple[Int32Array, list[int]]:
        """Remove leaves until at least ``count`` KV slots are freed or nothing is left to evict.

        Returns the freed KV slots and the state slots that went along. Leaf first; a leaf
        without a state saves nobody any compute and goes before those with one.
        """
        freed: list[Int32Array] = []
        states: list[int] = []
        total = 0
        while total < count:
            node = self._policy.take_kv()
            if node is None:
                break
            if node.state is not None:
                states.append(self.take_state(node, MissReason.EVICTED))
            freed.append(node.kv_slots)
            total += node.num_tokens
            self._remove(node)
        return (np.concatenate(freed) if freed else EMPTY_SLOTS), states

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.is_leaf
        assert node.kv_lock == 0
        assert node.state is None
        del parent.children[node.key[:TOKEN_BYTES]]
        node.parent = None
        self.num_tokens -= node.num_tokens
        self.version += 1
        self._settle(parent)
        self._drop_if_empty(parent)

    # ---- bookkeeping ----------------------------------------------------------------------------

    def _settle(self, node: Node) -> None:
        """``node`` may have become an unlocked leaf: offer it."""
        if node.parent is not None and node.is_leaf and node.kv_lock == 0:
            self._policy.offer_kv(node)

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = Node(self._new_id(), None, b"", EMPTY_SLOTS, new_hasher(namespace))
            self._roots[namespace] = root
            self._namespaces[root.node_id] = namespace
            self.version += 1
        return root

    def _drop_if_empty(self, node: Node) -> None:
        namespace = self._namespaces.get(node.node_id)
        if namespace is not None and node.is_leaf and node.kv_lock == 0:
            del self._roots[namespace], self._namespaces[node.node_id]
            self.version += 1

    def _namespace_of(self, node: Node) -> Namespace:
        return self._namespaces[node.root.node_id]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def roots(self) -> dict[Namespace, Node]:
        """The root of every namespace that holds anything (do not write)."""
        return self._roots

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _duplicates(
    mine: Int32Array, replaced: list[tuple[int, Int32Array]], protected_len: int
) -> Int32Array:
    """The caller's slots where the tree has others."""
    if not replaced:
        return EMPTY_SLOTS
    parts = []
    for start, slots in replaced:
        part = mine[start : start + len(slots)]
        differs = part != slots
        assert start + int(np.argmax(differs)) >= protected_len, "a protected slot differs"
        parts.append(part[differs])
    return np.concatenate(parts)

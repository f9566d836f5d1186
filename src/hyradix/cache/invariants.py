"""``check()``: proof that the cache is what DESIGN 2.1 and 3 say it is.

Owns: no state; reads everything, changes nothing. Cost: linear in the pools; for tests and for
``--check-invariants``. Raises ``AssertionError`` with the broken rule.
"""

from __future__ import annotations

import numpy as np

from hyradix.cache.node import TOKEN_BYTES, Node, new_hasher
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.cache.state_slots import SlotPhase
from hyradix.cache.tree import RadixTree


def check(cache: PrefixCache) -> None:
    """Every invariant of the tree and of both pools."""
    check_tree(cache.tree)
    check_locks(cache)
    check_kv_pool(cache)
    check_state_pool(cache)


def check_idle(cache: PrefixCache) -> None:
    """Oracle O2: nothing runs, so the tree owns what is not free and no lock is held."""
    check(cache)
    assert not cache.holdings, "a request still holds slots"
    assert cache.rows.num_reserved == 0, "KV slots are still promised"
    assert cache.table.num_free == cache.table.max_requests, "a row is lost"
    if not cache.pins.receipts:
        locks = [n for n in cache.tree.nodes() if n.kv_lock or n.state_lock]
        assert not locks, f"locks are lost: {locks}"
    assert cache.kv.num_free + cache.tree.num_tokens == cache.kv.num_total, "a KV slot is lost"
    assert cache.states.num_free + cache.tree.num_states == cache.states.num_total, (
        "a state is lost"
    )


def check_tree(tree: RadixTree) -> None:
    """Shape, digests, locks and counters of the tree alone."""
    tokens = locked = states = locked_states = 0
    for namespace, root in tree.roots().items():
        assert root.digest == new_hasher(namespace).intdigest()
        assert root.children or root.kv_lock, "an empty root is dropped"
    for node in tree.nodes():
        _check_node(node)
        tokens += node.num_tokens
        locked += node.num_tokens if node.kv_lock else 0
        states += node.state is not None
        locked_states += node.state_lock > 0
    counted = (tree.num_tokens, tree.num_locked_tokens, tree.num_states, tree.num_locked_states)
    assert counted == (tokens, locked, states, locked_states), (counted, tokens, locked, states)


def _check_node(node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert node.num_tokens > 0, "an empty node"
    assert len(node.key) == TOKEN_BYTES * node.num_tokens
    assert parent.children.get(node.key[:TOKEN_BYTES]) is node
    assert node.depth == parent.depth + node.num_tokens
    assert node.root is parent.root
    hasher = parent.hasher.copy()
    hasher.update(node.key)
    assert node.digest == hasher.intdigest(), "digest does not follow from the parent's"
    assert 0 <= node.kv_lock <= parent.kv_lock, "a child is locked more than its parent"
    assert node.state_lock >= 0
    assert node.state_lock == 0 or node.kv_lock > 0, "a state is locked without its KV"
    assert node.state_lock == 0 or node.state is not None, "a lock on a state that is not there"
    if node.state is not None:
        assert node.state.depth == node.depth, "a state at another depth than its node's end"
        assert node.state.digest == node.digest, "a state of another prefix"


def check_locks(cache: PrefixCache) -> None:
    """Lock counts equal the receipts that are out."""
    kv: dict[int, int] = {}
    states: dict[int, int] = {}
    receipts = list(cache.pins.receipts)
    for holding in cache.holdings.values():
        if holding.receipt is not None:
            receipts.append(holding.receipt)
            at = holding.receipt.kv_node
            assert at is not None
            assert at.depth == holding.protected_len, "the receipt is not where the share ends"
    for receipt in receipts:
        at = receipt.kv_node
        if receipt.state_node is not None:
            node_id = receipt.state_node.node_id
            states[node_id] = states.get(node_id, 0) + 1
        while at is not None:
            kv[at.node_id] = kv.get(at.node_id, 0) + 1
            at = at.parent
    for node in [*cache.tree.nodes(), *cache.tree.roots().values()]:
        assert node.kv_lock == kv.get(node.node_id, 0), f"{node}: KV locks without receipts"
        assert node.state_lock == states.get(node.node_id, 0), f"{node}: state locks unaccounted"


def check_kv_pool(cache: PrefixCache) -> None:
    """Each KV slot is free, owned by one row, or owned by one node; rows share the tree's."""
    owners = np.zeros(cache.kv.num_total + 1, dtype=np.int64)
    for node in cache.tree.nodes():
        np.add.at(owners, node.kv_slots, 1)
    for holding in cache.holdings.values():
        row = cache.protected_row(holding)
        np.add.at(owners, row[holding.protected_len :], 1)
        assert holding.protected_len <= holding.num_slots <= cache.table.kv_slots.shape[1]
        if holding.receipt is not None:
            _check_shared(holding.receipt.kv_node, row[: holding.protected_len])
    assert owners[0] == 0, "the sink has an owner"
    assert owners.max(initial=0) <= 1, "a KV slot has two owners"
    owned = np.flatnonzero(owners)
    assert not cache.kv.is_free(owned.astype(np.int32)), "an owned KV slot is free"
    assert len(owned) + cache.kv.num_free == cache.kv.num_total, "free + owned = total (KV)"
    reserved = cache.rows.num_reserved
    assert reserved == sum(h.reserved for h in cache.holdings.values())
    obtainable = cache.kv.num_free + cache.tree.num_evictable_tokens
    assert reserved <= obtainable, "more KV is promised than could be had"


def _check_shared(node: Node | None, row: np.ndarray) -> None:
    """The row's shared positions are exactly the tree's slots on the receipt's path."""
    while node is not None and node.parent is not None:
        begin = node.depth - node.num_tokens
        assert (row[begin : node.depth] == node.kv_slots).all(), "a row strays from the tree's KV"
        node = node.parent


def check_state_pool(cache: PrefixCache) -> None:
    """The phase of every state slot agrees with who refers to it."""
    states = cache.states
    expected = np.zeros(states.num_total + 1, dtype=np.int8)
    references = np.zeros(states.num_total + 1, dtype=np.int64)

    def refer(slot: int, phase: SlotPhase) -> None:
        references[slot] += 1
        expected[slot] = phase

    for node in cache.tree.nodes():
        if node.state is not None:
            refer(node.state.slot, SlotPhase.CHECKPOINT)
            assert states.depth[node.state.slot] == node.depth, "slot and node disagree on depth"
    for holding in cache.holdings.values():
        refer(holding.working_slot, SlotPhase.WORKING)
        for save in [*holding.pending, *holding.tracks]:
            refer(save.slot, SlotPhase.PENDING)
            assert states.depth[save.slot] == save.depth
    assert references[0] == 0, "the sink has an owner"
    assert references.max(initial=0) <= 1, "a state slot has two owners"
    assert (expected == states.phase).all(), "a state slot is in the wrong phase"
    owned = int(references.sum())
    assert owned + states.num_free == states.num_total, "free + owned = total (states)"

"""C24: random operations on the tree beside a model that is a dictionary of prefixes.

The model: (namespace, prefix) -> KV slot of its last token, and -> state slot. Requests hold rows
and receipts as the cache does; ``check_tree`` runs after every operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hyradix.cache.invariants import check_tree
from hyradix.cache.kv_slots import KVSlots
from hyradix.cache.node import InsertResult, Receipt
from hyradix.cache.state_slots import SlotPhase, StateSlots
from hyradix.request import MissReason, Namespace
from tests.support.tree_view import new_tree, pack, state_ref

SPACES = [Namespace("ab", "c"), Namespace("a", "bc")]
NUM_KV, NUM_STATES = 40, 8
Prefix = tuple[Namespace, tuple[int, ...]]

texts = st.lists(st.integers(2, 3), min_size=1, max_size=12).map(tuple)


@dataclass(eq=False)
class Row:
    """A request as far as the tree is concerned."""

    namespace: Namespace
    tokens: tuple[int, ...]
    kv: np.ndarray
    protected_len: int
    receipt: Receipt
    state_prefix: Prefix | None
    is_over: bool = field(default=False)


class TreeMachine(RuleBasedStateMachine):
    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.tree = new_tree()
        self.kv = KVSlots(NUM_KV)
        self.states = StateSlots(NUM_STATES)
        self.model_kv: dict[Prefix, int] = {}
        self.model_states: dict[Prefix, int] = {}
        self.live: list[Row] = []

    # ---- the model ----------------------------------------------------------

    def known(self, namespace: Namespace, tokens: tuple[int, ...], limit: int) -> int:
        depth = 0
        while depth < min(limit, len(tokens)) and (namespace, tokens[: depth + 1]) in self.model_kv:
            depth += 1
        return depth

    def locked(self) -> set[Prefix]:
        return {
            (row.namespace, row.tokens[:d])
            for row in self.live
            for d in range(1, row.protected_len + 1)
        }

    def locked_states(self) -> list[Prefix]:
        return [row.state_prefix for row in self.live if row.state_prefix is not None]

    # ---- operations -----------------------------------------------------------

    @rule(namespace=st.sampled_from(SPACES), tokens=texts, limit=st.integers(0, 12))
    def match(self, namespace: Namespace, tokens: tuple[int, ...], limit: int) -> None:
        version = self.tree.version
        limit = min(limit, len(tokens))
        found = self.tree.match_prefix(namespace, pack(tokens), limit=limit)
        depth = self.known(namespace, tokens, limit)
        assert found.num_kv_tokens == depth
        assert found.kv_slots.tolist() == [
            self.model_kv[namespace, tokens[:d]] for d in range(1, depth + 1)
        ]
        cached = [d for d in range(1, depth + 1) if (namespace, tokens[:d]) in self.model_states]
        assert found.num_cached_tokens == max(cached, default=0)
        if found.num_cached_tokens < found.num_kv_tokens:
            assert found.reason not in (MissReason.NONE, MissReason.COLD)
        assert self.tree.version == version, "a match changes nothing"

    @rule(target=rows, namespace=st.sampled_from(SPACES), tokens=texts)
    def start(self, namespace: Namespace, tokens: tuple[int, ...]) -> Row:
        found = self.tree.match_prefix(namespace, pack(tokens), limit=len(tokens) - 1)
        receipt = self.tree.lock(found)
        cached = found.num_cached_tokens
        state_prefix = (namespace, tokens[:cached]) if cached else None
        assert (receipt.state_node is None) == (state_prefix is None)
        row = Row(namespace, tokens, found.kv_slots, found.num_kv_tokens, receipt, state_prefix)
        self.live.append(row)
        need = len(tokens) - found.num_kv_tokens
        if need > self.kv.num_available:
            self.evict_kv(need - self.kv.num_available)
        if need > self.kv.num_available:
            self.abort(row)
        else:
            row.kv = np.concatenate([found.kv_slots, self.kv.allocate(need)])
        return row

    @rule(target=rows, row=rows, more=texts)
    def follow(self, row: Row, more: tuple[int, ...]) -> Row:
        """Another request with the same beginning, as most have."""
        return self.start(row.namespace, (row.tokens + more)[:12])

    @rule(row=rows, depth=st.integers(1, 12), has_state=st.booleans(), from_top=st.booleans())
    def insert(self, row: Row, depth: int, has_state: bool, from_top: bool) -> None:
        if row.is_over:
            return
        depth = min(depth, len(row.tokens))
        prefix, ref, slot = row.tokens[:depth], None, None
        if has_state:
            slot = self.new_state(depth)
            ref = None if slot is None else state_ref(slot, prefix, row.namespace)
        node = row.receipt.kv_node
        assert node is not None
        is_below = node.depth <= depth
        held = self.known(row.namespace, row.tokens, depth)
        result = self.tree.insert(
            row.namespace,
            pack(prefix),
            row.kv[:depth],
            ref,
            protected_len=row.protected_len,
            start=node if is_below and not from_top else None,
        )
        self.learn(row, depth, held, result)
        if is_below:
            self.tree.advance(row.receipt, result.node)
            row.protected_len = depth
        assert result.node.depth == depth
        if slot is not None:
            was = self.model_states.get((row.namespace, prefix))
            assert result.is_state_kept == (was is None)
            if was is None:
                self.model_states[row.namespace, prefix] = slot
            else:
                self.states.evict(slot)

    def learn(self, row: Row, depth: int, held: int, result: InsertResult) -> None:
        trees = [self.model_kv[row.namespace, row.tokens[:d]] for d in range(1, held + 1)]
        mine = row.kv[:held].tolist()
        duplicates = [m for m, t in zip(mine, trees, strict=True) if m != t]
        assert result.duplicates.tolist() == duplicates
        for at, values in result.replaced:
            row.kv[at : at + len(values)] = values
        assert row.kv[:held].tolist() == trees, "the row reads the tree's slots"
        self.kv.free(result.duplicates)
        for d in range(held + 1, depth + 1):
            self.model_kv[row.namespace, row.tokens[:d]] = int(row.kv[d - 1])

    def new_state(self, depth: int) -> int | None:
        if not self.states.num_available:
            self.evict_state()
        if not self.states.num_available:
            return None
        slot = self.states.take_pending(depth, 0)
        self.states.publish(slot, 0)
        return slot

    @rule(row=rows)
    def unlock_state(self, row: Row) -> None:
        if not row.is_over:
            self.tree.unlock_state(row.receipt)
            row.state_prefix = None

    @rule(row=rows)
    def move_state(self, row: Row) -> None:
        if row.is_over:
            return
        holders = self.locked_states().count(row.state_prefix) if row.state_prefix else 0
        slot = self.tree.move_state(row.receipt)
        assert (slot is not None) == (holders == 1)
        if slot is not None:
            assert slot == self.model_states.pop(row.state_prefix)
            row.state_prefix = None
            self.states.adopt(slot)
            self.states.release(slot)

    @rule(row=consumes(rows))
    def abort(self, row: Row) -> None:
        if row.is_over:
            return
        row.is_over = True
        self.live.remove(row)
        if len(row.kv) == len(row.tokens):
            self.kv.free(row.kv[row.protected_len :])
        self.tree.unlock_kv(row.receipt)

    @rule()
    def evict_state(self) -> None:
        evictable = set(self.model_states) - set(self.locked_states())
        assert self.tree.num_evictable_states == len(evictable)
        slot = self.tree.evict_state()
        assert (slot is None) == (not evictable)
        if slot is not None:
            (prefix,) = [p for p, s in self.model_states.items() if s == slot]
            assert prefix in evictable
            del self.model_states[prefix]
            self.states.evict(slot)

    @rule(count=st.integers(0, 12))
    def evict_kv(self, count: int) -> None:
        locked = self.locked()
        evictable = len(self.model_kv) - len(locked)
        assert self.tree.num_evictable_tokens == evictable
        freed, states = self.tree.evict_kv(count)
        assert len(freed) >= min(count, evictable)
        gone = {p for p, slot in self.model_kv.items() if slot in set(freed.tolist())}
        assert len(gone) == len(freed)
        assert not gone & locked
        for namespace, prefix in set(self.model_kv) - gone:
            assert all((namespace, prefix[:d]) not in gone for d in range(1, len(prefix)))
        for prefix in gone:
            del self.model_kv[prefix]
        lost = {p: s for p, s in self.model_states.items() if p in gone}
        assert sorted(lost.values()) == sorted(states)
        for prefix, slot in lost.items():
            del self.model_states[prefix]
            self.states.evict(slot)
        self.kv.reclaim(freed)

    @rule()
    def step(self) -> None:
        self.kv.begin_step()
        self.states.begin_step()

    # ---- after each -------------------------------------------------------------

    @invariant()
    def the_tree_is_sound(self) -> None:
        check_tree(self.tree)
        assert self.tree.num_tokens == len(self.model_kv)
        assert self.tree.num_states == len(self.model_states)
        assert self.states.count(SlotPhase.CHECKPOINT) == len(self.model_states)
        own = sum(len(r.kv) - r.protected_len for r in self.live)
        assert self.kv.num_free + len(self.model_kv) + own == NUM_KV
        assert set(self.tree.roots()) >= {ns for ns, _ in self.model_kv}

    @invariant()
    def locks_equal_receipts(self) -> None:
        counts: dict[int, int] = {}
        for row in self.live:
            node = row.receipt.kv_node
            while node is not None:
                counts[node.node_id] = counts.get(node.node_id, 0) + 1
                node = node.parent
        for node in [*self.tree.nodes(), *self.tree.roots().values()]:
            assert node.kv_lock == counts.get(node.node_id, 0)

    def teardown(self) -> None:
        for row in list(self.live):
            self.abort(row)
        while self.model_states:
            self.evict_state()
        self.evict_kv(NUM_KV)
        assert self.tree.roots() == {}, "an empty root is dropped"
        assert (self.tree.num_tokens, self.tree.num_states) == (0, 0)
        assert (self.tree.num_locked_tokens, self.tree.num_locked_states) == (0, 0)
        assert self.kv.num_free == NUM_KV


TreeMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase

"""Which state and which KV leaf go next under ``lru``."""

from __future__ import annotations

import pytest

from hyradix.cache.policy import LRUPolicy
from hyradix.cache.tree import RadixTree
from hyradix.request import MissReason
from tests.support.drive import text
from tests.support.tree_view import NOBODY, new_tree, node_at, pack, span, state_ref


def grow(tree: RadixTree, tokens: list[int], first_kv: int, state: int | None) -> None:
    ref = None if state is None else state_ref(state, tokens)
    slots = span(first_kv, first_kv + len(tokens) - 1)
    tree.insert(NOBODY, pack(tokens), slots, ref, protected_len=0)


def touch(tree: RadixTree, tokens: list[int]) -> None:
    match = tree.match_prefix(NOBODY, pack(tokens), limit=len(tokens))
    receipt = tree.lock(match)
    tree.touch(receipt)
    tree.unlock_kv(receipt)


@pytest.fixture
def prompts() -> list[list[int]]:
    return [text(seed, 4) for seed in range(5)]


def test_states_go_least_recently_used_first(prompts: list[list[int]]) -> None:
    tree = new_tree()
    for i, prompt in enumerate(prompts):
        grow(tree, prompt, 1 + 4 * i, state=i + 1)
    touch(tree, prompts[0])
    touch(tree, prompts[3])
    assert [tree.evict_state() for _ in range(6)] == [2, 3, 5, 1, 4, None]
    assert (tree.num_states, tree.num_tokens) == (0, 20)


def test_a_locked_state_stays_and_comes_back_into_the_order(prompts: list[list[int]]) -> None:
    tree = new_tree()
    for i, prompt in enumerate(prompts[:3]):
        grow(tree, prompt, 1 + 4 * i, state=i + 1)
    receipt = tree.lock(tree.match_prefix(NOBODY, pack(prompts[0]), limit=4))
    assert tree.num_evictable_states == 2
    assert [tree.evict_state() for _ in range(3)] == [2, 3, None]
    tree.unlock_state(receipt)
    assert tree.evict_state() == 1


def test_tombstone_leaves_go_before_leaves_with_a_state(prompts: list[list[int]]) -> None:
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    grow(tree, prompts[1], 5, state=None)
    grow(tree, prompts[2], 9, state=3)
    assert tree.evict_state() == 1
    kv, states = tree.evict_kv(1)
    assert (kv.tolist(), states) == ([1, 2, 3, 4], [])
    kv, states = tree.evict_kv(5)
    assert (kv.tolist(), states) == ([5, 6, 7, 8, 9, 10, 11, 12], [3])
    assert tree.roots() == {}


def test_a_tombstone_goes_first_though_it_was_used_last(prompts: list[list[int]]) -> None:
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    grow(tree, prompts[1], 5, state=None)
    touch(tree, prompts[1])
    kv, states = tree.evict_kv(1)
    assert (kv.tolist(), states) == ([5, 6, 7, 8], [])


def test_a_tombstone_chain_goes_up_to_the_first_ancestor_worth_something() -> None:
    tree = new_tree()
    long = text(1, 12)
    grow(tree, long[:4], 1, state=1)
    for end in (6, 8, 12):
        grow(tree, long[:end], 1, state=None)
    other = text(2, 3)
    grow(tree, other, 20, state=2)
    kv, states = tree.evict_kv(8)
    assert sorted(kv.tolist()) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert states == []
    assert node_at(tree, long, 4).is_leaf


def test_locked_kv_and_its_ancestors_stay(prompts: list[list[int]]) -> None:
    tree = new_tree()
    chain = prompts[0] + prompts[1]
    grow(tree, chain[:4], 1, state=None)
    grow(tree, chain, 1, state=None)
    grow(tree, prompts[2], 20, state=None)
    receipt = tree.lock(tree.match_prefix(NOBODY, pack(chain), limit=6))
    assert tree.num_evictable_tokens == 6
    kv, _ = tree.evict_kv(100)
    assert sorted(kv.tolist()) == [7, 8, 20, 21, 22, 23]
    tree.unlock_kv(receipt)
    assert sorted(tree.evict_kv(100)[0].tolist()) == [1, 2, 3, 4, 5, 6]
    assert (tree.num_tokens, tree.num_states) == (0, 0)


def test_states_and_kv_have_two_recencies(prompts: list[list[int]]) -> None:
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    grow(tree, prompts[0] + prompts[1], 1, state=2)
    grow(tree, prompts[2], 20, state=3)
    touch(tree, prompts[0] + prompts[1])
    assert tree.evict_state() == 1, "a hit refreshes what was resumed from, not its ancestors"
    kv, states = tree.evict_kv(1)
    assert (kv.tolist(), states) == ([20, 21, 22, 23], [3])


def test_what_was_evicted_is_remembered(prompts: list[list[int]]) -> None:
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    tree.evict_state()
    match = tree.match_prefix(NOBODY, pack(prompts[0]), limit=4)
    assert (match.num_kv_tokens, match.num_cached_tokens) == (4, 0)
    assert match.reason is MissReason.EVICTED
    grow(tree, prompts[0], 1, state=1)
    assert tree.match_prefix(NOBODY, pack(prompts[0]), limit=4).reason is MissReason.NONE


def test_what_came_back_is_not_called_evicted(prompts: list[list[int]]) -> None:
    """It came back and was then superseded, which nobody counts as an eviction."""
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    tree.evict_state()
    grow(tree, prompts[0], 1, state=2)
    tree.take_state(node_at(tree, prompts[0], 4), None)
    match = tree.match_prefix(NOBODY, pack(prompts[0] + [9]), limit=5)
    assert (match.num_kv_tokens, match.num_cached_tokens) == (4, 0)
    assert match.reason is MissReason.NEVER_PLACED


def test_offers_without_end_do_not_grow_the_heaps() -> None:
    policy = LRUPolicy()
    tree = RadixTree(policy)
    prompts = [text(seed, 3) for seed in range(20)]
    for i, prompt in enumerate(prompts):
        grow(tree, prompt, 1 + 3 * i, state=i + 1)
    for turn in range(3000):
        touch(tree, prompts[turn % 20])
    sizes = [len(h._heap) for h in (policy._states, policy._kv)]
    assert max(sizes) < 200, "the cost of finding a victim stays flat"
    assert tree.evict_state() == 1


def test_a_newer_tombstone_leaf_goes_before_an_older_leaf_with_a_state(
    prompts: list[list[int]],
) -> None:
    tree = new_tree()
    grow(tree, prompts[0], 1, state=1)
    grow(tree, prompts[1], 20, state=None)
    kv, states = tree.evict_kv(1)
    assert (kv.tolist(), states) == ([20, 21, 22, 23], [])
    kv, states = tree.evict_kv(1)
    assert (kv.tolist(), states) == ([1, 2, 3, 4], [1])

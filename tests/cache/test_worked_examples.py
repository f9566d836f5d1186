"""The worked examples of the design, with every slot number and depth."""

from __future__ import annotations

import pytest

from hyradix.cache.invariants import check_tree
from hyradix.request import MissReason, StateOpKind
from tests.support.drive import CHUNKS, Driver, cached, row_slots, state_ops, text
from tests.support.harness import Harness, make_config
from tests.support.tree_view import (
    NOBODY,
    all_states,
    depths_along,
    kv_along,
    new_tree,
    node_at,
    pack,
    segments,
    shape,
    slots,
    span,
    state_ref,
    states_along,
)

MODES = pytest.mark.parametrize(
    ("chunk", "overlap"), [(chunk, overlap) for chunk in CHUNKS for overlap in (False, True)]
)

A_TO_H = [65, 66, 67, 68, 69, 70, 71, 72]


class TestOnTheTree:
    def test_w1_three_requests_make_three_branches(self) -> None:
        tree = new_tree()
        r1 = text(1, 30)
        r2 = r1 + text(2, 11)
        r3 = r1[:10] + text(3, 15)

        first = tree.lock(tree.match_prefix(NOBODY, pack(r1), limit=29))
        result = tree.insert(
            NOBODY, pack(r1), span(1, 30), state_ref(1, r1), protected_len=0, start=first.kv_node
        )
        assert result.is_state_kept
        assert result.duplicates.tolist() == []
        tree.advance(first, result.node)
        check_tree(tree)
        assert shape(tree) == ((30, 1, ()),)

        match = tree.match_prefix(NOBODY, pack(r2), limit=40)
        assert (match.num_kv_tokens, match.num_cached_tokens) == (30, 30)
        assert match.kv_slots.tolist() == list(range(1, 31))
        assert match.reason is MissReason.NONE
        second = tree.lock(match)
        assert second.state_node is second.kv_node is result.node
        row = [*range(1, 31), *range(31, 42)]
        result = tree.insert(
            NOBODY, pack(r2), slots(*row), state_ref(2, r2), protected_len=30, start=second.kv_node
        )
        tree.advance(second, result.node)
        check_tree(tree)
        assert shape(tree) == ((30, 1, ((11, 2, ()),)),)

        match = tree.match_prefix(NOBODY, pack(r3), limit=24)
        assert (match.num_kv_tokens, match.num_cached_tokens) == (10, 0)
        assert match.kv_slots.tolist() == list(range(1, 11))
        assert match.reason is MissReason.NEVER_PLACED
        third = tree.lock(match)
        assert third.state_node is None
        row = [*range(1, 11), *range(42, 57)]
        result = tree.insert(
            NOBODY, pack(r3), slots(*row), state_ref(3, r3), protected_len=10, start=third.kv_node
        )
        tree.advance(third, result.node)
        check_tree(tree)
        assert shape(tree) == ((10, None, ((20, 1, ((11, 2, ()),)), (15, 3, ()))),)
        assert node_at(tree, r1, 10).is_tombstone
        assert node_at(tree, r1, 10).kv_slots.tolist() == list(range(1, 11))
        assert node_at(tree, r1, 30).kv_slots.tolist() == list(range(11, 31))
        assert node_at(tree, r2, 41).kv_slots.tolist() == list(range(31, 42))
        assert node_at(tree, r3, 25).kv_slots.tolist() == list(range(42, 57))
        assert [node_at(tree, r1, d).kv_lock for d in (10, 30)] == [3, 2]
        for receipt in (first, second, third):
            tree.unlock_kv(receipt)
        check_tree(tree)
        assert tree.num_evictable_tokens == 56

    def test_w2_two_chunks_of_four(self) -> None:
        tree = new_tree()
        receipt = tree.lock(tree.match_prefix(NOBODY, pack(A_TO_H), limit=7))
        one = tree.insert(
            NOBODY,
            pack(A_TO_H[:4]),
            span(10, 13),
            state_ref(100, A_TO_H[:4]),
            protected_len=0,
            start=receipt.kv_node,
        )
        tree.advance(receipt, one.node)
        two = tree.insert(
            NOBODY,
            pack(A_TO_H),
            slots(10, 11, 12, 13, 20, 21, 22, 23),
            state_ref(101, A_TO_H),
            protected_len=4,
            start=receipt.kv_node,
        )
        tree.advance(receipt, two.node)
        check_tree(tree)
        assert two.duplicates.tolist() == []
        assert two.replaced == ()
        assert shape(tree) == ((4, 100, ((4, 101, ()),)),)
        assert one.node.kv_slots.tolist() == [10, 11, 12, 13]
        assert two.node.kv_slots.tolist() == [20, 21, 22, 23]
        assert (one.node.depth, two.node.depth) == (4, 8)

    @pytest.mark.parametrize("from_receipt", [True, False])
    def test_w3_duplicates_are_freed_and_the_row_reads_the_trees(self, from_receipt: bool) -> None:
        tree = new_tree()
        four, six = A_TO_H[:4], A_TO_H[:6]
        tree.insert(NOBODY, pack(four), span(10, 13), state_ref(100, four), protected_len=0)
        match = tree.match_prefix(NOBODY, pack(A_TO_H), limit=7)
        assert (match.num_kv_tokens, match.num_cached_tokens) == (4, 4)
        receipt = tree.lock(match)
        tree.insert(
            NOBODY,
            pack(six),
            slots(10, 11, 12, 13, 30, 31),
            state_ref(105, six),
            protected_len=4,
        )
        row = slots(10, 11, 12, 13, 20, 21, 22, 23)
        result = tree.insert(
            NOBODY,
            pack(A_TO_H),
            row,
            state_ref(101, A_TO_H),
            protected_len=4,
            start=receipt.kv_node if from_receipt else None,
        )
        assert result.duplicates.tolist() == [20, 21]
        assert [(at, s.tolist()) for at, s in result.replaced] == [(4, [30, 31])]
        for at, values in result.replaced:
            row[at : at + len(values)] = values
        assert row.tolist() == [10, 11, 12, 13, 30, 31, 22, 23]
        assert shape(tree) == ((4, 100, ((2, 105, ((2, 101, ()),)),)),)
        assert result.node.kv_slots.tolist() == [22, 23]
        check_tree(tree)


class TestThroughTheScheduler:
    @MODES
    def test_w1_the_third_leaves_a_state_where_it_branched(self, chunk: int, overlap: bool) -> None:
        h = Harness(make_config(max_prefill_tokens=chunk, overlap=overlap))
        r1 = text(1, 30)
        r2, r3 = r1 + text(2, 11), r1[:10] + text(3, 15)
        assert cached(h.serve(r1, 1)) == (0, 0)
        assert depths_along(h.cache.tree, r1) == [29, 30]
        assert cached(h.serve(r2, 1)) == (30, 30)
        assert depths_along(h.cache.tree, r2) == [29, 30, 40, 41]
        third = h.serve(r3, 1)
        assert cached(third) == (0, 10)
        assert third.state.miss_reason is MissReason.NEVER_PLACED
        assert depths_along(h.cache.tree, r3) == [10, 24, 25]
        cut = [6] if chunk == 16 else []  # where a chunk ended: KV was given to the tree there
        assert segments(h.cache.tree, r2) == [10, *cut, 19 - sum(cut), 1, 10, 1]
        assert segments(h.cache.tree, r3) == [10, *cut, 14 - sum(cut), 1]
        assert h.cache.tree.num_tokens == 41 + 15
        h.finish()

    @pytest.mark.parametrize("overlap", [False, True])
    def test_w2_the_second_chunk_goes_on_from_the_working_state(self, overlap: bool) -> None:
        h = Driver(make_config(max_prefill_tokens=4, overlap=overlap))
        prompt = text(4, 12)
        record = h.add(prompt, 1)
        h.begin()
        h.end()
        first = states_along(h.cache.tree, prompt)
        assert list(first) == [4]
        working = h.runner.log[0].state_slots.tolist()
        kv = kv_along(h.cache.tree, prompt)
        h.begin()
        h.end()
        second = h.runner.log[1]
        assert second.state_ops == ()
        assert second.state_slots.tolist() == working
        assert (second.starts.tolist(), second.num_tokens.tolist()) == ([4], [4])
        assert second.kv_updates[0].start == 4
        assert len(second.kv_updates) == 1
        assert list(states_along(h.cache.tree, prompt)) == [8], (
            "the chunk end at 4 has done its duty"
        )
        assert node_at(h.cache.tree, prompt, 4).is_tombstone
        assert kv_along(h.cache.tree, prompt)[:4] == kv
        assert first[4] not in all_states(h.cache.tree)
        h.finish()
        assert depths_along(h.cache.tree, prompt) == [11, 12]
        assert record.state.num_cached_tokens == 0

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", [*CHUNKS, 7])
    def test_w4_two_requests_start_from_one_warm_state(self, chunk: int, overlap: bool) -> None:
        h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
        warm = text(5, 30)
        h.serve(warm, 1)
        assert depths_along(h.cache.tree, warm)[-1] == 30
        warm_slot = states_along(h.cache.tree, warm)[30]
        warm_kv = kv_along(h.cache.tree, warm)
        assert len(warm_kv) == 30

        before = len(h.runner.log)
        forty = h.add(warm + text(6, 10), 5)
        forty_five = h.add(warm + text(7, 15), 20)
        both_run = False
        while forty.reason is None:
            h.step()
            both_run |= h.scheduler.num_running == 2
        assert both_run
        assert cached(forty) == (30, 30)
        assert cached(forty_five) == (30, 30)
        log = h.runner.log[before:]
        rows = [init.row for batch in log for init in batch.row_inits]
        assert [row_slots(h, row, 30) for row in rows] == [warm_kv, warm_kv]
        copies = state_ops(h, before)
        assert [op.kind for op in copies] == [StateOpKind.COPY] * 2
        assert [op.source for op in copies] == [warm_slot] * 2
        working = {op.destination for op in copies}
        assert len(working) == 2
        assert warm_slot not in working
        assert all(set(b.write_from.tolist()) == set(b.starts.tolist()) for b in log)
        assert min(start for b in log for start in b.starts.tolist()) == 30

        reply_end = node_at(h.cache.tree, forty.tokens, 44)
        assert reply_end.state is not None, "44 of 45 tokens are consumed"
        own = [n for n in segments(h.cache.tree, forty.tokens)]
        assert sum(own) == 44
        starts = [sum(own[:i]) for i in range(len(own))]
        assert 30 in starts, "its own part starts at 30"
        assert states_along(h.cache.tree, warm)[30] == warm_slot
        h.close()

    @MODES
    def test_w5_nothing_wrong_is_resumed_before_the_state(self, chunk: int, overlap: bool) -> None:
        h = Harness(make_config(max_prefill_tokens=chunk, overlap=overlap))
        prompt = text(8, 8)
        h.serve(prompt, 1)
        assert depths_along(h.cache.tree, prompt) == [7, 8]
        kv = kv_along(h.cache.tree, prompt)
        before = len(h.runner.log)
        record = h.serve(prompt[:4], 1)
        assert cached(record) == (0, 3)
        assert record.state.miss_reason is MissReason.BEYOND_LAST
        (batch,) = h.runner.log[before:]
        assert [op.kind for op in batch.state_ops] == [StateOpKind.CLEAR]
        assert batch.write_from.tolist() == [3]
        updates = sorted((u.start, u.values.tolist()) for u in batch.kv_updates)
        assert updates[0] == (0, kv[:3])
        assert [(start, len(values)) for start, values in updates[1:]] == [(3, 1)]
        assert h.cache.tree.num_tokens == 8, "the fourth token's duplicate was freed"
        h.finish()

"""The KV allocator: ascending runs, quarantine, no slot twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyradix.cache.kv_slots import KVSlots
from tests.support.tree_view import slots


def test_the_sink_is_never_handed_out_and_runs_ascend() -> None:
    kv = KVSlots(8)
    assert kv.num_total == kv.num_free == kv.num_available == 8
    assert kv.allocate(3).tolist() == [1, 2, 3]
    assert kv.allocate(5).tolist() == [4, 5, 6, 7, 8]
    assert kv.num_available == 0
    assert kv.allocate(0).tolist() == []


def test_freed_slots_come_back_with_the_next_step_only() -> None:
    kv = KVSlots(4)
    taken = kv.allocate(4)
    kv.free(taken[1:3])
    assert (kv.num_available, kv.num_free) == (0, 2)
    with pytest.raises(AssertionError):
        kv.allocate(1)
    kv.begin_step()
    assert kv.allocate(2).tolist() == [2, 3]


def test_reclaimed_slots_come_back_at_once_and_sorted() -> None:
    kv = KVSlots(6)
    kv.allocate(6)
    kv.reclaim(slots(5, 2))
    kv.reclaim(slots(3))
    assert kv.num_available == 3
    assert kv.allocate(3).tolist() == [2, 3, 5]


@pytest.mark.parametrize("give_back", ["free", "reclaim"])
def test_illegal_returns_assert(give_back: str) -> None:
    kv = KVSlots(4)
    kv.allocate(2)
    with pytest.raises(AssertionError, match="sink"):
        getattr(kv, give_back)(slots(0))
    with pytest.raises(AssertionError, match="twice"):
        getattr(kv, give_back)(slots(4))
    getattr(kv, give_back)(slots(1))
    with pytest.raises(AssertionError, match="twice"):
        getattr(kv, give_back)(slots(1))
    getattr(kv, give_back)(slots())
    assert kv.num_free == 3


def test_more_than_there_is_asserts() -> None:
    kv = KVSlots(2)
    with pytest.raises(AssertionError):
        kv.allocate(3)
    assert kv.num_available == 2


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "reclaim", "step"]), st.integers(1, 9))))
def test_every_slot_is_in_one_place(operations: list[tuple[str, int]]) -> None:
    kv, held, quarantined = KVSlots(12), [], 0
    for name, count in operations:
        if name == "step":
            kv.begin_step()
            quarantined = 0
        elif name == "take" and count <= kv.num_available:
            got = kv.allocate(count).tolist()
            assert got == sorted(set(got))
            assert not set(got) & set(held)
            held += got
        elif name in ("free", "reclaim") and held:
            back, held = held[:count], held[count:]
            getattr(kv, name)(np.array(back, dtype=np.int32))
            quarantined += len(back) if name == "free" else 0
        assert kv.num_free == 12 - len(held)
        assert kv.num_available == kv.num_free - quarantined
        assert not held or not kv.is_free(np.array(held, dtype=np.int32))

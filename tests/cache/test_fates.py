"""Why a state is not there: a bounded memory beside the tree."""

from __future__ import annotations

from hyradix.cache.fates import Fates
from hyradix.request import MissReason, Namespace

HERE, THERE = Namespace(), Namespace(salt="x")


def test_what_was_noted_is_remembered_per_namespace_depth_and_digest() -> None:
    fates = Fates()
    fates.note(HERE, 10, 99, MissReason.EVICTED)
    assert fates.reason(HERE, 10, 99) is MissReason.EVICTED
    assert fates.reason(THERE, 10, 99) is None
    assert fates.reason(HERE, 11, 99) is None
    assert fates.reason(HERE, 10, 98) is None
    fates.note(HERE, 10, 99, MissReason.NO_SLOT)
    assert fates.reason(HERE, 10, 99) is MissReason.NO_SLOT
    fates.forget(HERE, 10, 99)
    fates.forget(HERE, 10, 99)
    assert fates.reason(HERE, 10, 99) is None


def test_the_least_recently_noted_is_forgotten_first() -> None:
    fates = Fates(capacity=3)
    for depth in (1, 2, 3):
        fates.note(HERE, depth, 0, MissReason.EVICTED)
    fates.note(HERE, 1, 0, MissReason.EVICTED)
    fates.note(HERE, 4, 0, MissReason.EVICTED)
    assert [fates.reason(HERE, d, 0) is not None for d in (1, 2, 3, 4)] == [True, False, True, True]


def test_it_knows_at_which_depths_anything_is_remembered() -> None:
    fates = Fates(capacity=2)
    assert not fates.has_any(10)
    fates.note(HERE, 10, 1, MissReason.EVICTED)
    fates.note(HERE, 10, 1, MissReason.NO_SLOT)
    fates.note(HERE, 10, 2, MissReason.EVICTED)
    fates.forget(HERE, 10, 1)
    assert fates.has_any(10)
    fates.forget(HERE, 10, 2)
    assert not fates.has_any(10)
    for depth in (1, 2, 3):
        fates.note(HERE, depth, 0, MissReason.EVICTED)
    assert [fates.has_any(depth) for depth in (1, 2, 3)] == [False, True, True]

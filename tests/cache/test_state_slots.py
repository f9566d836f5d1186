"""Life of a state slot: every legal transition, and every other one asserts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hyradix.cache.state_slots import SlotPhase, StateSlots

TRANSITIONS: dict[str, tuple[Callable[[StateSlots, int], None], set[SlotPhase], SlotPhase]] = {
    "publish": (lambda s, n: s.publish(n, 7), {SlotPhase.PENDING}, SlotPhase.CHECKPOINT),
    "donate": (lambda s, n: s.donate(n, 5), {SlotPhase.WORKING}, SlotPhase.CHECKPOINT),
    "adopt": (lambda s, n: s.adopt(n), {SlotPhase.CHECKPOINT}, SlotPhase.WORKING),
    "release": (lambda s, n: s.release(n), {SlotPhase.WORKING, SlotPhase.PENDING}, SlotPhase.FREE),
    "evict": (lambda s, n: s.evict(n), {SlotPhase.CHECKPOINT}, SlotPhase.FREE),
}


def in_phase(phase: SlotPhase) -> tuple[StateSlots, int]:
    """A pool of four with one slot in ``phase`` (written by step 7, at depth 5)."""
    states = StateSlots(4)
    if phase is SlotPhase.FREE:
        return states, 2
    if phase is SlotPhase.WORKING:
        return states, states.take_working()
    slot = states.take_pending(5, 7)
    if phase is SlotPhase.CHECKPOINT:
        states.publish(slot, 7)
    return states, slot


@pytest.mark.parametrize("phase", list(SlotPhase))
@pytest.mark.parametrize("name", list(TRANSITIONS))
def test_transition(name: str, phase: SlotPhase) -> None:
    act, legal, after = TRANSITIONS[name]
    states, slot = in_phase(phase)
    if phase not in legal:
        with pytest.raises(AssertionError):
            act(states, slot)
        assert states.phase[slot] == phase, "a refused transition changes nothing"
        return
    act(states, slot)
    assert states.phase[slot] == after
    if after is SlotPhase.CHECKPOINT:
        assert states.depth[slot] == 5
    else:
        assert states.depth[slot] == -1


def test_a_state_is_not_published_before_it_is_written() -> None:
    states = StateSlots(2)
    slot = states.take_pending(5, 7)
    with pytest.raises(AssertionError, match="before it is written"):
        states.publish(slot, 6)


@pytest.mark.parametrize("name", list(TRANSITIONS))
def test_the_sink_has_no_life(name: str) -> None:
    states = StateSlots(2)
    with pytest.raises(AssertionError):
        TRANSITIONS[name][0](states, 0)


def test_the_pool_is_handed_out_whole_without_the_sink() -> None:
    states = StateSlots(3)
    assert {states.take_working() for _ in range(3)} == {1, 2, 3}
    assert (states.num_available, states.num_free) == (0, 0)
    assert states.count(SlotPhase.WORKING) == 3


def test_released_slots_wait_for_the_next_step_and_evicted_ones_do_not() -> None:
    states = StateSlots(2)
    working, pending = states.take_working(), states.take_pending(3, 0)
    states.release(working)
    assert (states.num_available, states.num_free) == (0, 1)
    states.publish(pending, 0)
    states.evict(pending)
    assert (states.num_available, states.num_free) == (1, 2)
    assert states.take_working() == pending
    states.begin_step()
    assert states.take_working() == working

"""Every miss has a reason: one test for each."""

from __future__ import annotations

import pytest

from hyradix.request import Boundary, BoundaryKind, MissReason
from tests.support.drive import Driver, cached, text
from tests.support.harness import make_config

BASE = text(1, 60)


def test_cold() -> None:
    h = Driver(make_config())
    assert h.serve(BASE, 1).state.miss_reason is MissReason.COLD
    assert h.serve(text(2, 60), 1).state.miss_reason is MissReason.COLD
    h.close()


def test_beyond_last_where_nothing_may_be_resumed() -> None:
    h = Driver(make_config())
    h.serve(BASE, 1)
    assert h.serve([BASE[0]], 1).state.miss_reason is MissReason.BEYOND_LAST
    assert h.serve(BASE, 1, prompt_logprobs=0).state.miss_reason is MissReason.BEYOND_LAST
    h.close()


def test_none() -> None:
    h = Driver(make_config())
    h.serve(BASE, 1)
    record = h.serve(BASE + text(3, 9), 1)
    assert cached(record) == (60, 60)
    assert record.state.miss_reason is MissReason.NONE
    h.close()


def test_never_placed() -> None:
    h = Driver(make_config())
    h.serve(BASE, 1)
    record = h.serve(BASE[:40] + text(3, 9), 1)
    assert cached(record) == (0, 40)
    assert record.state.miss_reason is MissReason.NEVER_PLACED
    h.close()


@pytest.mark.parametrize("n", [2, 4, 40, 59])
def test_beyond_last(n: int) -> None:
    h = Driver(make_config())
    h.serve(BASE, 1)
    record = h.serve(BASE[:n], 1)
    assert cached(record) == (0, n - 1)
    assert record.state.miss_reason is MissReason.BEYOND_LAST
    h.close()


def test_evicted_state() -> None:
    h = Driver(make_config(states=3, max_requests=1))
    h.serve(BASE, 1)
    h.serve(text(2, 60), 1)
    record = h.serve(BASE, 1)
    assert record.state.miss_reason is MissReason.EVICTED
    assert record.state.num_kv_tokens == 59, "the KV is still there"
    h.close()


def test_evicted_kv_is_remembered_for_the_same_prompt() -> None:
    h = Driver(make_config(kv_slots=100, max_context=100))
    h.serve(BASE, 1)
    h.serve(text(2, 90), 1)
    record = h.serve(BASE, 1)
    assert cached(record) == (0, 0)
    assert record.state.miss_reason is MissReason.EVICTED
    h.close()


def test_no_slot() -> None:
    """Two rows, two working states: nothing is left for the boundary at 30, nor to evict."""
    h = Driver(make_config(states=2, max_requests=2))
    h.add(text(5, 20), 40)
    h.step()
    h.add(BASE, 1, boundaries=[Boundary(30, BoundaryKind.TURN)])
    h.run(until=lambda: h.scheduler.num_running == 1)
    record = h.add(BASE[:30] + text(6, 9), 1)
    h.close()
    assert cached(record) == (0, 30)
    assert record.state.miss_reason is MissReason.NO_SLOT
    assert h.cache.counters.skipped_saves > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_known", [True, False], ids=["KV is there", "nothing is"])
def test_in_flight(is_known: bool, overlap: bool) -> None:
    """What two share is less than is worth waiting for, and the first is just writing it."""
    h = Driver(make_config(overlap=overlap))
    shared = BASE[:20]
    if is_known:
        h.serve(BASE, 1)
    marks = [] if is_known else [Boundary(20, BoundaryKind.TURN)]
    one = h.add(shared + text(5, 9), 3, boundaries=marks)
    two = h.add(shared + text(6, 9), 3)
    h.begin()
    assert two.state.num_in_flight == one.state.num_in_flight == 1, "neither waits"
    h.close()
    assert cached(two) == (0, 20 if is_known else 0)
    assert two.state.miss_reason is MissReason.IN_FLIGHT


def test_every_reason_is_counted_once() -> None:
    h = Driver(make_config())
    for prompt in (BASE, BASE, BASE[:20], text(2, 9)):
        h.serve(prompt, 1)
    assert h.scheduler.miss_reasons == {"cold": 2, "none": 1, "beyond_last": 1}
    h.close()

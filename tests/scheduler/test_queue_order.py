"""Who of the queue is admitted next: first come, first served, or the longest cached prefix."""

from __future__ import annotations

import pytest

from hyradix.scheduler.scheduler import OVERDUE_STEPS
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import Record, make_config

BASE = text(1, 60)


def driver(order: str, **options: object) -> Driver:
    """One row, and ``BASE`` in the cache with states at 59 and 60."""
    h = Driver(make_config(order=order, max_requests=1, **options))
    h.serve(BASE, 1)
    h.serve(BASE[:20] + text(2, 9), 1)  # leaves a state at 20
    return h


def order_of_admission(h: Driver, records: list[Record]) -> list[int]:
    """Indices of ``records``, as they were given the row."""
    seen: list[int] = []
    while h.step():
        for at, record in enumerate(records):
            if record.state.num_admissions and at not in seen:
                seen.append(at)
    return seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("longest_prefix", [2, 1, 0, 3])]
)
def test_the_longest_cached_prefix_goes_first(
    order: str, expected: list[int], chunk: int, overlap: bool
) -> None:
    h = driver(order, max_prefill_tokens=chunk, overlap=overlap)
    prompts = [text(3, 30), BASE[:20] + text(4, 9), BASE + text(5, 9), text(6, 30)]
    records = [h.add(prompt, 3) for prompt in prompts]
    assert order_of_admission(h, records) == expected
    assert [cached(record)[0] for record in records] == [0, 20, 60, 0]
    h.close()


@pytest.mark.parametrize(("steps", "expected"), [(9, [0, 1]), (OVERDUE_STEPS + 2, [1, 0])])
def test_nobody_waits_for_ever_for_those_with_longer_prefixes(
    steps: int, expected: list[int]
) -> None:
    h = driver("longest_prefix")
    h.add(text(7, 30), steps)
    h.step()
    cold = h.add(text(8, 30), 2)
    h.run(until=lambda: not h.scheduler.num_running)
    known = h.add(BASE + text(9, 9), 2)
    assert order_of_admission(h, [known, cold]) == expected
    h.close()

"""Random schedules through the real scheduler: O1 for every request, O2 at rest, check() always.

The quick profile runs with the suite. The long one is 10,000 examples of 60 operations:

    pytest -m long -s tests/scheduler/test_schedules.py

(``HYRADIX_SCHEDULES`` and ``HYRADIX_FIRST_SEED`` change how many, and hypothesis's seed.) Its last
result stands in benchmarks/results/schedules.md.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.world import World

EVENTS = {
    "evict": ("evicted states", "evicted kv"),
    "split": ("splits",),
    "preempt": ("preemptions",),
    "abort in flight": ("aborts in flight",),
    "accept drafts": ("accepted tokens",),
    "fold": ("folds",),
}
"""What must happen in at least a tenth of the long run's schedules, or it proves little."""

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LONG = settings(QUICK, database=None, suppress_health_check=list(HealthCheck))
"""Sixty operations draw more than hypothesis thinks wise."""


@QUICK
@given(rng=st.randoms(use_true_random=False), num_operations=st.integers(5, 40))
def test_any_schedule(rng: Random, num_operations: int) -> None:
    World(rng).walk(num_operations)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_seeded_schedules(first: int) -> None:
    for number in range(first, first + 40):
        try:
            World(Random(number)).walk(40)
        except BaseException as error:
            error.add_note(f"seed {number}")
            raise


@pytest.mark.long
@pytest.mark.timeout(0)
def test_ten_thousand_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    count = int(os.environ.get("HYRADIX_SCHEDULES", "10000"))
    first = int(os.environ.get("HYRADIX_FIRST_SEED", "1000000"))
    seen: Counter[str] = Counter()

    @seed(first)
    @settings(LONG, max_examples=count)
    @given(rng=st.randoms(use_true_random=False))
    def walk(rng: Random) -> None:
        world = World(rng)
        world.walk(60)
        seen.update(world.seen, schedules=1)
        seen.update(
            f"schedules with {event}"
            for event, names in EVENTS.items()
            if any(world.seen[name] for name in names)
        )

    walk()
    with capsys.disabled():
        print(*(f"  {name:28} {number}" for name, number in sorted(seen.items())), sep="\n")
    assert seen["schedules"] >= count
    rare = [event for event in EVENTS if 10 * seen[f"schedules with {event}"] < seen["schedules"]]
    assert not rare, f"in less than a tenth of the schedules: {rare}"

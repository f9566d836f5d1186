"""O1 on the demo model: what the cache gives back never changes an output."""

from __future__ import annotations

import pytest

from tests.oracles.schedules import Tally, run
from tests.support.demo import DemoEngines


@pytest.fixture(scope="module")
def engines() -> DemoEngines:
    return DemoEngines()


def _check(tally: Tally) -> None:
    assert not tally.failures
    assert len(tally.near_ties) <= max(1, tally.requests // 1000)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"overlap": True, "force_preempt_every": 3}])
def test_a_few_schedules(engines: DemoEngines, options: dict[str, object]) -> None:
    tally = run(engines, 4, seed=1, **options)
    _check(tally)
    assert tally.cached_tokens


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_schedules(engines: DemoEngines) -> None:
    tally = run(engines, 200)
    _check(tally)
    assert tally.cached_tokens >= 0.3 * tally.prompt_tokens
    assert tally.resumes_off_chunk >= 0.5 * tally.resumes


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_schedules_preempted_with_overlap(engines: DemoEngines) -> None:
    tally = run(engines, 200, overlap=True, force_preempt_every=3)
    _check(tally)
    assert tally.preemptions

"""What is believed of drafts: by the age of a reply, and by how much a request may differ."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hyradix.request import Request, SamplingParams
from hyradix.scheduler.draft_acceptance import (
    AGES,
    MOST_HOPE,
    NEVER,
    OWN_WEIGHTS,
    PRIOR,
    Acceptance,
    age_of,
    oldest_of,
    steps_to_next_age,
)
from hyradix.scheduler.request_state import RequestState

DEPTH, PROMPT = 4, 10
OLD = AGES[-1]


def reply(length: int = 0, *, max_tokens: int | None = None) -> RequestState:
    """A request whose reply is so long."""
    request = Request(
        request_id="r",
        prompt_token_ids=np.arange(PROMPT, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
    )
    state = RequestState.create(request, max_context=1 << 20)
    state.num_scheduled_tokens = PROMPT + length
    return state


def draft(acceptance: Acceptance, state: RequestState, chance: float, rng: Random) -> None:
    """One round of a whole chain."""
    right = 0
    while right < DEPTH and rng.random() < chance:
        right += 1
    acceptance.think()
    acceptance.learn(state, right, min(right + 1, DEPTH))


def chance_of(acceptance: Acceptance, length: int, depth: int = 0) -> float:
    """Everybody's, for a request of which nothing is known."""
    acceptance.think()
    return float(acceptance.of([reply(length)], 0.0)[0, depth])


def weight_of(acceptance: Acceptance) -> float:
    return OWN_WEIGHTS[acceptance._foretold.index(max(acceptance._foretold))]


@pytest.mark.parametrize(
    ("length", "age", "left"),
    [(0, 0, 16), (15, 0, 1), (16, 1, 16), (31, 1, 1), (32, 2, NEVER), (999, 2, NEVER)],
)
def test_ages_begin_at_their_token(length: int, age: int, left: int) -> None:
    assert (age_of(reply(length)), steps_to_next_age(reply(length))) == (age, left)


def test_a_reply_comes_no_further_than_its_limit() -> None:
    assert [oldest_of(reply(max_tokens=n)) for n in (1, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]
    assert oldest_of(reply()) == len(AGES)


def test_at_first_older_replies_promise_more() -> None:
    acceptance = Acceptance(DEPTH)
    found = [chance_of(acceptance, length) for length in (0, *AGES)]
    assert found[0] == pytest.approx(PRIOR)
    assert found == sorted(found)
    assert found[0] < found[1] < found[2] < MOST_HOPE
    for depth in range(DEPTH):
        assert chance_of(acceptance, 0, depth) == pytest.approx(PRIOR)


def test_each_age_has_chances_of_its_own() -> None:
    acceptance, rng = Acceptance(DEPTH), Random(1)
    for _ in range(400):
        draft(acceptance, reply(3), 0.4, rng)
        draft(acceptance, reply(OLD), 0.9, rng)
    assert chance_of(acceptance, 0) == pytest.approx(0.4, abs=0.1)
    assert chance_of(acceptance, OLD + 50) == pytest.approx(0.9, abs=0.1)


@pytest.mark.parametrize("chance", [0.05, 0.95])
def test_an_age_that_was_never_seen_takes_after_the_younger_one(chance: float) -> None:
    acceptance, rng = Acceptance(DEPTH), Random(2)
    before = [chance_of(acceptance, length) for length in (0, *AGES)]
    for _ in range(200):
        draft(acceptance, reply(3), chance, rng)
    after = [chance_of(acceptance, length) for length in (0, *AGES)]
    for old, new in zip(before, after, strict=True):
        assert (new > old) == (chance > 0.5)
    assert after == sorted(after), "what is believed of growing older is kept"


def test_a_depth_that_was_never_seen_differs_as_the_one_before_it() -> None:
    """Old replies fail at once: their second drafts, never judged, are thought worse as well."""
    acceptance, rng = Acceptance(DEPTH), Random(3)
    for _ in range(200):
        draft(acceptance, reply(3), 0.8, rng)
        draft(acceptance, reply(AGES[0]), 0.0, rng)
    assert chance_of(acceptance, AGES[0], 1) < 0.2 < 0.6 < chance_of(acceptance, 3, 1)


def served(acceptance: Acceptance, chances: tuple[float, ...], seed: int) -> None:
    rng = Random(seed)
    for number in range(40):
        state = reply(OLD)
        for _ in range(20):
            draft(acceptance, state, chances[number % len(chances)], rng)


@pytest.mark.parametrize("seed", range(5))
def test_how_far_a_request_may_differ_is_learned(seed: int) -> None:
    mixed, uniform = Acceptance(DEPTH), Acceptance(DEPTH)
    served(mixed, (0.1, 0.9), seed)
    assert weight_of(mixed) == OWN_WEIGHTS[0]
    assert weight_of(uniform) == OWN_WEIGHTS[-1], "at first all are thought alike"
    served(uniform, (0.8,), seed)
    assert weight_of(uniform) == OWN_WEIGHTS[-1]
    served(mixed, (0.8,), seed)
    served(mixed, (0.8,), seed)
    assert weight_of(mixed) == OWN_WEIGHTS[-1], "what was mixed need not stay so"


def test_a_request_that_differs_is_told_apart_and_not_for_ever() -> None:
    acceptance, rng = Acceptance(DEPTH), Random(4)
    served(acceptance, (0.1, 0.9), 4)
    good, bad = reply(OLD), reply(OLD)
    for _ in range(10):
        draft(acceptance, good, 0.95, rng)
        draft(acceptance, bad, 0.05, rng)
    acceptance.think()
    of_good, fresh, of_bad = acceptance.of([good, reply(OLD), bad], 0.0)[:, 0].tolist()
    assert of_good > 1.2 * fresh
    assert of_bad < 0.5 * fresh
    for _ in range(30):
        acceptance.give_up(bad)
    assert acceptance.of([bad], 0.0)[0, 0] == pytest.approx(fresh, rel=0.02)


def test_without_measurements_chances_go_back_to_what_was_thought_at_first() -> None:
    acceptance, rng = Acceptance(DEPTH), Random(5)
    for _ in range(300):
        draft(acceptance, reply(3), 0.02, rng)
    low, doubt = chance_of(acceptance, 3), acceptance.hopes(1.0)[0, 0]
    found = [low]
    for _ in range(10):
        for _ in range(40):
            acceptance.fade()
        found.append(chance_of(acceptance, 3))
    assert low < 0.1
    assert found == sorted(found)
    assert found[-1] == pytest.approx(PRIOR, abs=0.02)
    assert acceptance.hopes(1.0)[0, 0] > doubt


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_chances_stay_what_chances_can_be(chance: float) -> None:
    acceptance, rng, state = Acceptance(DEPTH), Random(6), reply(OLD)
    for _ in range(2000):
        draft(acceptance, state, chance, rng)
        draft(acceptance, reply(3), 1.0 - chance, rng)
    acceptance.think()
    for optimism in (0.0, 0.5, 1.0):
        found = acceptance.of([state, reply(), reply(20)], optimism)
        assert (found >= 0.0).all()
        assert (found <= MOST_HOPE).all()
    assert np.isfinite(acceptance._foretold).all()

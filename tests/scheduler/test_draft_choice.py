"""The automatic choice: its arithmetic against brute force, and what it comes to at length."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from hyradix.request import Request, SamplingParams
from hyradix.scheduler.automatic_drafting import AutomaticDrafting, make_drafting
from hyradix.scheduler.draft_choice import StepCosts, choose_chain, costs_at
from hyradix.scheduler.drafting import Drafting
from hyradix.scheduler.request_state import RequestState
from hyradix.spec_config import DraftShape, RoundCosts, SpecConfig

COSTS = RoundCosts(
    rows=(1, 8, 32),
    plain=(1.0, 1.6, 4.0),
    node=(0.05, 0.12, 0.12),
    draft=(0.2, 0.3, 0.8),
    round=(0.2, 0.4, 0.9),
)
"""Much like a CPU: verifying is nearly free for one row, and costs a token's time for many."""
HEAD_COSTS = RoundCosts(
    rows=(1, 8, 32),
    plain=(1.0, 1.5, 4.7),
    node=(0.085, 0.16, 0.12),
    draft=(0.28, 0.45, 1.25),
    round=(0.4, 0.44, 3.4),
)
"""A draft head on a CPU: a round gains little for one row, and nothing for many."""


def spec(topk: int = 1, steps: int = 5, nodes: int = 6, proposer: str = "ngram") -> SpecConfig:
    shape = DraftShape(topk=topk, steps=steps, nodes=nodes)
    return SpecConfig(proposer=proposer, state="snapshot", shape=shape, is_automatic=True)  # type: ignore[arg-type]


def rate(acceptance: np.ndarray, depths: list[int], costs: StepCosts) -> float:
    gain = sum(np.cumprod(row[:depth]).sum() for row, depth in zip(acceptance, depths, strict=True))
    seconds = costs.plain
    if any(depths):
        seconds += costs.round + costs.draft * max(depths) + costs.node * sum(depths)
    return (len(depths) + gain) / seconds


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_about_the_best_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, deepest = int(rng.integers(1, 4)), 4
    acceptance = rng.uniform(0.05, 0.98, (num_rows, deepest))
    limits = rng.integers(0, deepest + 1, num_rows)
    costs = StepCosts(1.0, *rng.uniform(0.01, 0.4, 3))
    choice = choose_chain(acceptance, limits, costs)
    assert (choice.depths <= limits).all()
    best = max(
        rate(acceptance, list(depths), costs)
        for depths in itertools.product(*(range(limit + 1) for limit in limits))
    )
    assert choice.rate == pytest.approx(rate(acceptance, choice.depths.tolist(), costs))
    gains = [np.cumprod(a[:k]).sum() for a, k in zip(acceptance, choice.depths, strict=True)]
    seconds = (num_rows + sum(gains)) / choice.rate
    assert choice.least == pytest.approx((1.0 + min(gains)) / seconds)
    assert choice.rate >= 0.98 * best


def test_costs_between_and_beyond_what_was_measured() -> None:
    assert costs_at(COSTS, 1).plain == 1.0
    assert 1.0 < costs_at(COSTS, 4).plain < 1.6
    assert costs_at(COSTS, 64).plain == pytest.approx(8.0)


@dataclass
class Served:
    """What a long run came to, in made-up seconds."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0


def make_state(name: str, arrival: int) -> RequestState:
    request = Request(
        request_id=name,
        prompt_token_ids=np.arange(8, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=None),
        seed=0,
    )
    state = RequestState.create(request, max_context=1 << 20, arrival=arrival)
    state.num_scheduled_tokens = 8
    return state


def enter(drafting: Drafting, number: int, num_running: int) -> RequestState:
    state = make_state(str(number), number)
    drafting.admit(state, num_running)
    return state


Chance = float | Callable[[int, int], float]
"""Of a draft; or by the request's number and the step."""


def serve(
    drafting: Drafting,
    num_rows: int,
    chance: Chance,
    *,
    steps: int = 600,
    length: int = 80,
    seed: int = 1,
    is_waited_for: bool = True,
    all_costs: RoundCosts = COSTS,
) -> Served:
    """Requests of ``length`` steps, ``num_rows`` at a time; a draft is right by ``chance``."""
    rng, served, count = Random(seed), Served(), num_rows
    rows = [enter(drafting, i, num_rows) for i in range(num_rows)]
    followed = [state.is_followed for state in rows]
    for step in range(steps):
        if step % length == length - 1:
            rows = [enter(drafting, count + i, num_rows) for i in range(num_rows)]
            followed = [state.is_followed for state in rows]
            count += num_rows
        drafting.begin_step(rows, is_waited_for=is_waited_for)
        limits = [
            drafting.limit(state) if was and state.is_followed else (1, 1)
            for state, was in zip(rows, followed, strict=True)
        ]
        followed = [state.is_followed for state in rows]
        nodes = sum(nodes for nodes, _ in limits)
        depth = max(accepted for _, accepted in limits) - 1
        costs = costs_at(all_costs, num_rows)
        seconds = costs.plain
        if nodes > num_rows:
            seconds += costs.round + costs.draft * depth + costs.node * (nodes - num_rows)
        for state, (num_nodes, accepted) in zip(rows, limits, strict=True):
            right = 0
            own = chance(state.arrival, step) if callable(chance) else chance
            while right < accepted - 1 and rng.random() < own:
                right += 1
            served.tokens += 1 + right
            served.rounds += num_nodes > 1
            drafting.learn(state, num_nodes, right, min(num_nodes, accepted) - 1)
        drafting.learn_time(num_rows, nodes, depth, seconds)
        served.seconds += seconds
    return served


class Fixed(Drafting):
    """Chains of one depth for everybody."""

    def __init__(self, depth: int) -> None:
        super().__init__(None)
        self._depth = depth

    def limit(self, state: RequestState) -> tuple[int, int]:
        return self._depth + 1, self._depth + 1


SEEDS = range(1, 6)


def best_fixed(num_rows: int, chance: Chance, *, steps: int, length: int = 80) -> float:
    """Tokens a second of the best chain for everybody, of none too."""
    found = []
    for depth in range(6):
        runs = [
            serve(Fixed(depth), num_rows, chance, steps=steps, length=length, seed=seed)
            for seed in SEEDS
        ]
        found.append(sum(run.tokens for run in runs) / sum(run.seconds for run in runs))
    return max(found)


def check_choice(
    num_rows: int, chance: Chance, proposer: str, *, first: int, steps: int, length: int = 80
) -> None:
    """The two bounds. Against plain: for each run, and for what it learns in before, by itself.

    Against the best fixed shape: for all runs together. Where drafts pay by a tenth, one run may
    have so bad luck at first that it believes the opposite, and credit to find out comes slowly.
    """
    plain, runs = num_rows / costs_at(COSTS, num_rows).plain, []
    for seed in SEEDS:
        drafting = AutomaticDrafting(spec(proposer=proposer), COSTS)
        learning = serve(drafting, num_rows, chance, steps=first, length=length, seed=seed + 100)
        assert learning.tokens / learning.seconds >= 0.97 * plain
        run = serve(drafting, num_rows, chance, steps=steps, length=length, seed=seed)
        assert run.tokens / run.seconds >= 0.97 * plain
        runs.append(run)
    speed = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
    assert speed >= 0.95 * best_fixed(num_rows, chance, steps=steps, length=length)


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 0.6, 0.8, 0.9, 0.95])
def test_never_much_under_plain_and_near_the_best_fixed_choice(
    num_rows: int, chance: float, proposer: str
) -> None:
    check_choice(num_rows, chance, proposer, first=300, steps=600)


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_short_replies_are_no_reason_to_lose(num_rows: int, chance: float, proposer: str) -> None:
    check_choice(num_rows, chance, proposer, first=300, steps=600, length=10)


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_requests_that_differ_are_served_as_well_as_by_one_shape(
    num_rows: int, proposer: str
) -> None:
    def mixed(number: int, step: int) -> float:
        return 0.9 if number % 2 else 0.1

    check_choice(num_rows, mixed, proposer, first=600, steps=1200)


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("period", [40, 200, 1000])
def test_a_chance_that_comes_and_goes_is_no_reason_to_lose(
    num_rows: int, period: int, proposer: str
) -> None:
    drafting = AutomaticDrafting(spec(proposer=proposer), COSTS)
    found = serve(
        drafting, num_rows, lambda _, step: 0.9 if step // period % 2 else 0.0, steps=2000
    )
    plain = num_rows / costs_at(COSTS, num_rows).plain
    assert found.tokens / found.seconds >= 0.97 * plain


def scaled(costs: RoundCosts, factor: float) -> RoundCosts:
    return RoundCosts(
        rows=costs.rows,
        plain=tuple(factor * cost for cost in costs.plain),
        node=tuple(factor * cost for cost in costs.node),
        draft=tuple(factor * cost for cost in costs.draft),
        round=tuple(factor * cost for cost in costs.round),
    )


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_costs_that_were_measured_wrongly_do_no_harm(num_rows: int, wrong: float) -> None:
    costs = replace(scaled(COSTS, wrong), plain=COSTS.plain)
    drafting = AutomaticDrafting(spec(), costs)
    found = serve(drafting, num_rows, 0.3, steps=400)
    assert found.tokens / found.seconds >= 0.97 * num_rows / costs_at(COSTS, num_rows).plain


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_nobody_pays_for_anothers_drafts_unless_others_wait(proposer: str) -> None:
    def all_but_one(number: int, step: int) -> float:
        return 0.02 if number % 4 == 0 else 0.97

    plain = costs_at(COSTS, 4).plain
    alone = AutomaticDrafting(spec(proposer=proposer), COSTS)
    found = serve(alone, 4, all_but_one, steps=1200, is_waited_for=False)
    assert 1200 * plain / found.seconds >= 0.97
    waited_for = AutomaticDrafting(spec(proposer=proposer), COSTS)
    better = serve(waited_for, 4, all_but_one, steps=1200)
    assert better.tokens / better.seconds >= 1.1 * 4 / plain
    assert better.rounds > 4 * found.rounds


@pytest.mark.parametrize("num_rows", [1, 2])
def test_drafts_that_pay_for_all_are_taken_while_nobody_waits(num_rows: int) -> None:
    drafting = AutomaticDrafting(spec(), COSTS)
    found = serve(drafting, num_rows, 0.95, steps=1200, is_waited_for=False)
    assert found.tokens / found.seconds >= 1.2 * num_rows / costs_at(COSTS, num_rows).plain


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_a_machine_that_becomes_slow_is_no_reason_to_draft(proposer: str) -> None:
    drafting = AutomaticDrafting(spec(proposer=proposer), HEAD_COSTS)
    slow = serve(drafting, 8, 0.95, steps=600, all_costs=scaled(HEAD_COSTS, 5.0))
    assert slow.rounds == 0


def test_bad_luck_at_first_does_not_end_drafts_that_pay() -> None:
    speeds, fixed = [], []
    for seed in range(1, 13):

        def lucky(number: int, step: int, seed: int = seed) -> float:
            is_good = Random(1000 * (number + 77 * seed) + step // 4).random() < 0.8
            return 0.97 if is_good else 0.1

        for drafting, found in ((AutomaticDrafting(spec(proposer="mtp"), HEAD_COSTS), speeds),
                                (Fixed(5), fixed)):  # fmt: skip
            run = serve(drafting, 1, lucky, steps=1600, seed=seed, all_costs=HEAD_COSTS)
            found.append(run.tokens / run.seconds)
    assert sum(speeds) >= 0.95 * sum(fixed)
    assert min(speeds) >= 1.1


def test_nothing_is_tried_where_even_the_best_drafts_would_not_pay() -> None:
    slow = RoundCosts(rows=(1, 32), plain=(1.0, 3.0), node=(1.0, 3.0), draft=(1, 2), round=(1, 1))
    for proposer in ("ngram", "mtp"):
        drafting = AutomaticDrafting(spec(proposer=proposer), slow)
        assert serve(drafting, 32, 0.98, steps=300).rounds == 0


def test_a_chain_shape_has_no_trees() -> None:
    drafting = AutomaticDrafting(spec(topk=1, steps=7, nodes=8), COSTS)
    rows = [make_state("r", 0)]
    for _ in range(200):
        drafting.begin_step(rows, is_waited_for=True)
        nodes, accepted = drafting.limit(rows[0])
        assert drafting.topk <= 1
        assert nodes == accepted
        if nodes > 1:
            drafting.learn(rows[0], nodes, nodes - 1, nodes - 1)
        drafting.learn_time(1, nodes, nodes - 1, 1.0 if nodes == 1 else 1.5)


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_a_change_of_what_is_served_is_noticed(proposer: str) -> None:
    drafting = AutomaticDrafting(spec(proposer=proposer), COSTS)
    serve(drafting, 1, 0.1, steps=1600)
    serve(drafting, 1, 0.95, steps=2400)
    better = serve(drafting, 1, 0.95, steps=400)
    assert better.rounds > 200
    serve(drafting, 1, 0.1, steps=200)
    worse = serve(drafting, 1, 0.1, steps=400)
    assert worse.rounds < 40


def test_a_request_that_was_given_up_has_no_more_drafts() -> None:
    drafting = AutomaticDrafting(spec(proposer="mtp"), COSTS)
    serve(drafting, 32, 0.05, steps=200)
    rows = [make_state(f"new-{i}", 1 + 16 * i) for i in range(4)]
    drafting.begin_step(rows, is_waited_for=True)
    given_up = [state for state in rows if not state.is_followed]
    assert len(given_up) >= 3  # one may be on trial
    for _ in range(100):
        drafting.begin_step(rows, is_waited_for=True)
        assert all(drafting.limit(state) == (1, 1) for state in given_up)
        assert not any(state.is_followed for state in given_up)


def test_no_chain_is_longer_than_what_is_left_of_a_request() -> None:
    drafting = AutomaticDrafting(spec(), COSTS)
    state = make_state("r", 0)
    state.max_total_tokens = 11  # 8 consumed, one known: one more draft would be the last token
    drafting.begin_step([state], is_waited_for=True)
    assert drafting.limit(state)[1] <= 2


def test_only_an_automatic_shape_is_chosen() -> None:
    fixed = SpecConfig(
        proposer="ngram",
        state="log",
        shape=DraftShape(topk=2, steps=3, nodes=8),
        is_automatic=False,
    )
    drafting = make_drafting(fixed, None)
    assert drafting.limit(make_state("r", 0)) == (8, 4)
    assert make_drafting(None, None).limit(make_state("r", 0)) == (1, 1)
    assert isinstance(make_drafting(spec(), None), AutomaticDrafting)

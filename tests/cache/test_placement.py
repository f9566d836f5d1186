"""Where checkpoints are tried for: n-1 always, boundaries, the branch, a minimum gain, a cap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyradix.cache.placement import Candidate, CheckpointKind, plan_candidates
from hyradix.request import Boundary, BoundaryKind


def plan(n: int, *, cached: int = 0, kv: int | None = None, **more: object) -> list[Candidate]:
    options = {"boundaries": (), "min_gain": 32, "max_checkpoints": 16, **more}
    return plan_candidates(
        num_prompt_tokens=n,
        num_cached_tokens=cached,
        num_kv_tokens=cached if kv is None else kv,
        **options,
    )


def turns(*positions: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(p, BoundaryKind.TURN) for p in positions)


@pytest.mark.parametrize("n", [2, 3, 33, 512])
def test_the_prompts_end_is_always_there_and_urgent(n: int) -> None:
    assert plan(n) == [Candidate(n - 1, CheckpointKind.PROMPT_END, True)]


def test_a_prompt_of_one_token_has_no_place() -> None:
    assert plan(1) == []


def test_nothing_is_placed_again_where_the_request_resumed() -> None:
    assert plan(31, cached=30, kv=30) == []
    assert [c.position for c in plan(100, cached=40, boundaries=turns(20, 40, 70))] == [70, 99]


def test_the_branching_point_is_a_candidate() -> None:
    assert plan(100, cached=10, kv=50)[0] == Candidate(50, CheckpointKind.BRANCH, True)
    assert [c.position for c in plan(100, cached=50, kv=50)] == [99]


def test_boundaries_at_and_past_the_last_token_or_repeated_are_ignored() -> None:
    result = plan(100, boundaries=turns(-3, 0, 40, 40, 99, 100, 101, 5000))
    assert [c.position for c in result] == [40, 99]
    assert result[1].kind is CheckpointKind.PROMPT_END


def test_the_better_kind_names_a_shared_position() -> None:
    both = (Boundary(40, BoundaryKind.TURN), Boundary(40, BoundaryKind.SYSTEM))
    assert plan(100, boundaries=both)[0].kind is CheckpointKind.SYSTEM
    assert plan(100, boundaries=both[::-1])[0].kind is CheckpointKind.SYSTEM
    assert plan(100, kv=40, boundaries=both)[0].kind is CheckpointKind.BRANCH


@pytest.mark.parametrize(("gain", "urgent"), [(31, False), (32, True), (33, True)])
def test_minimum_gain(gain: int, urgent: bool) -> None:
    assert plan(500, cached=100, boundaries=turns(100 + gain))[0].is_urgent is urgent
    assert plan(100 + gain + 1, cached=100, kv=100)[-1].is_urgent, "the prompt's end is exempt"


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_the_cap_keeps_the_best_kinds_and_the_prompts_end(cap: int) -> None:
    marks = (*turns(*range(40, 400, 40)), Boundary(60, BoundaryKind.SYSTEM))
    result = plan(500, boundaries=marks, max_checkpoints=cap)
    assert len(result) == cap
    assert result[-1].position == 499
    assert cap == 1 or result[0].position == 60


def test_a_boundary_whose_kv_is_there_is_not_worth_an_eviction_again() -> None:
    result = plan(400, cached=40, kv=200, boundaries=turns(100, 200, 300))
    assert [(c.position, c.is_urgent) for c in result] == [
        (100, False),
        (200, True),
        (300, True),
        (399, True),
    ]
    assert result[1].kind is CheckpointKind.BRANCH


def test_a_long_stretch_gets_a_ladder_in_spare_slots() -> None:
    result = plan(3001, cached=100, kv=200, boundaries=turns(500))
    rungs = [c for c in result if c.kind is CheckpointKind.LADDER]
    assert [c.position for c in rungs] == [
        *(952, 1012, 1524, 1976, 2488, 2548),
        *(2616, 2744, 2872),
    ]
    assert not any(c.is_urgent for c in rungs)
    assert [c.position for c in result if c not in rungs] == [200, 500, 3000]


@pytest.mark.parametrize("n", [512, 513, 514, 700, 5000, 60_000])
@pytest.mark.parametrize("cap", [1, 3, 16])
def test_a_ladder_yields_to_every_other_kind(n: int, cap: int) -> None:
    marks = turns(40, 80)
    result = plan(n, boundaries=marks, max_checkpoints=cap)
    kept = [c.position for c in result if c.kind is not CheckpointKind.LADDER]
    assert kept == [40, 80, n - 1][3 - min(cap, 3) :]
    assert len(result) <= cap
    is_long = n - 1 - 80 >= 512
    assert any(c.kind is CheckpointKind.LADDER for c in result) == (is_long and cap > 3)


@given(
    n=st.integers(2, 200),
    cached=st.integers(0, 198),
    extra=st.integers(0, 60),
    boundaries=st.lists(
        st.builds(Boundary, st.integers(-5, 250), st.sampled_from(BoundaryKind)), max_size=30
    ),
    min_gain=st.integers(0, 64),
    cap=st.integers(1, 20),
)
def test_candidates_rise_within_what_is_computed(
    n: int, cached: int, extra: int, boundaries: list[Boundary], min_gain: int, cap: int
) -> None:
    cached = min(cached, n - 1)
    kv = min(cached + extra, n - 1)
    result = plan(
        n, cached=cached, kv=kv, boundaries=boundaries, min_gain=min_gain, max_checkpoints=cap
    )
    positions = [c.position for c in result]
    assert positions == sorted(set(positions))
    assert len(positions) <= cap
    assert all(cached < p <= n - 1 for p in positions)
    assert cached == n - 1 or positions[-1] == n - 1
    if len({b.position for b in boundaries}) + 2 <= cap:
        assert {b.position for b in boundaries if cached < b.position <= n - 1} <= set(positions)

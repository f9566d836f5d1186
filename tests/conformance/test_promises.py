"""O4: ``cached_tokens`` is at least what the placement of checkpoints promises, given slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.request import Boundary, BoundaryKind, MissReason
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

QUICK = settings(max_examples=40, deadline=None)
chunks = st.sampled_from([*CHUNKS, 1, 7])


@QUICK
@given(
    shared=st.integers(1, 120),
    tails=st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 80)),
    is_boundary=st.booleans(),
    others=st.lists(st.integers(1, 200), max_size=5),
    chunk=chunks,
    overlap=st.booleans(),
)
def test_rule_1_second_at_the_deepest_candidate_third_exactly_there(
    shared: int,
    tails: tuple[int, int, int],
    is_boundary: bool,
    others: list[int],
    chunk: int,
    overlap: bool,
) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    base = text(1, shared)
    marks = [Boundary(p, BoundaryKind.TURN) for p in others]
    if is_boundary:
        marks.append(Boundary(shared, BoundaryKind.SYSTEM))
    # the tails part at their first token
    one, two, three = ([*base, 30 + i, *text(50 + i, n)] for i, n in enumerate(tails))
    h.serve(one, 2, boundaries=marks)
    under = max(
        (b.position for b in marks if 0 < b.position <= min(shared, len(one) - 1)), default=0
    )
    second = h.serve(two, 2)
    assert second.state.num_cached_tokens >= under
    if is_boundary:
        assert cached(second) == (shared, shared)
    third = h.serve(three, 2)
    assert cached(third) == (shared, shared)
    assert third.state.miss_reason is MissReason.NONE
    h.close()


@QUICK
@given(
    turns=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=6),
    chunk=chunks,
    overlap=st.booleans(),
)
def test_rule_2_a_turn_resumes_at_the_end_of_the_reply(
    turns: list[tuple[int, int]], chunk: int, overlap: bool
) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    prompt: list[int] = []
    expected = 0
    for i, (length, max_tokens) in enumerate(turns):
        prompt = prompt + text(i, length)
        record = h.serve(prompt, max_tokens)
        assert record.state.num_cached_tokens == expected
        prompt = record.tokens
        expected = len(prompt) - 1
    h.close()


@QUICK
@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=8),
    scans=st.integers(0, 12),
    chunk=chunks,
)
def test_rule_3_a_working_set_that_is_used_survives_a_scan_in_between(
    lengths: list[int], scans: int, chunk: int
) -> None:
    """The pool holds the set and two scans' worth: what is used again is not what goes."""
    h = Driver(make_config(states=2 * len(lengths) + 6, max_requests=1, max_prefill_tokens=chunk))
    prompts = [text(i, n) for i, n in enumerate(lengths)]
    for prompt in prompts:
        h.serve(prompt, 1)
    for turn in range(scans):
        h.serve(text(100 + turn, 20), 1)
        for prompt in prompts:
            assert h.serve(prompt, 1).state.num_cached_tokens == len(prompt) - 1
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_rule_3_a_fork_early_on_a_long_chain_has_a_reason_when_it_misses(
    chunk: int, overlap: bool
) -> None:
    """C9 for any policy: a miss with KV resident says why."""
    h = Driver(
        make_config(
            states=6,
            max_requests=1,
            kv_slots=4000,
            max_context=1500,
            max_prefill_tokens=chunk,
            overlap=overlap,
        )
    )
    chain: list[int] = []
    for turn in range(20):
        chain = h.serve(chain + text(turn, 40), 10).tokens
    fork = h.serve(chain[:200] + text(99, 40), 2)
    assert fork.state.num_kv_tokens == 200
    if fork.state.num_cached_tokens < 200:
        assert fork.state.miss_reason not in (MissReason.NONE, MissReason.COLD)
    assert 200 in depths_along(h.cache.tree, fork.tokens)
    h.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("chunk", "length"), [(0, 32_768), (128, 32_768), (16, 4_096)])
def test_c9_a_fork_on_an_old_chain_after_fillers_says_why(
    length: int, chunk: int, overlap: bool
) -> None:
    """A small state pool and all KV there: the chain's states have gone to the fillers."""
    h = Driver(
        make_config(
            states=6,
            max_requests=1,
            kv_slots=2 * length,
            max_context=length + 60,
            max_prefill_tokens=chunk,
            overlap=overlap,
        ),
        is_checking=False,
    )
    chain = text(1, length)
    h.serve(chain, 1)
    for filler in range(8):
        h.serve(text(10 + filler, 40), 2)
    for at in (500, length // 2, length - 1):
        fork = h.serve(chain[:at] + text(100 + at, 40), 2)
        assert fork.state.num_kv_tokens == at
        assert fork.state.num_cached_tokens < at, "the policy did not keep it"
        why = (MissReason.EVICTED, MissReason.NEVER_PLACED, MissReason.NO_SLOT)
        assert fork.state.miss_reason in why
        again = h.serve(chain[:at] + text(200 + at, 40), 2)
        assert cached(again) == (at, at), "the fork has left one"
    h.close()

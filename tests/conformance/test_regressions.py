"""Faults that the scenarios found once; each was seen to fail before it was mended."""

from __future__ import annotations

import contextlib

import pytest

from hyradix.cache.placement import plan_candidates
from hyradix.config import Settings
from hyradix.errors import CapacityError, ConfigError
from hyradix.request import Boundary, BoundaryKind, Request, SamplingParams
from tests.support.drive import CHUNKS, Driver, cached, reply, text
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along, pack


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("shared", [170, 200])
def test_two_that_wait_together_compute_what_they_share_once(shared: int, chunk: int) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk))
    base = text(1, shared)
    h.add(base + text(2, 50), 3)
    two = h.add(base + text(3, 50), 3)
    h.close()
    assert cached(two) == (shared, shared)


@pytest.mark.parametrize(("is_cached", "others"), [(False, 1), (True, 2)])
def test_a_track_does_not_keep_others_out(is_cached: bool, others: int) -> None:
    size = others + 1
    h = Driver(
        make_config(
            max_requests=size, states=size, track_interval=4, prefix_cache=is_cached, kv_slots=900
        )
    )
    first = h.add(text(1, 10), 200)
    for _ in range(12):
        h.step()
    later = [h.add(text(2 + i, 10), 100) for i in range(others)]
    for _ in range(4):
        h.step()
    assert not first.reason
    assert all(r.output for r in later), "a row is free and nothing may take a slot for good"


def test_dropping_a_chunk_end_spares_what_another_donated() -> None:
    h = Driver(make_config(max_prefill_tokens=16, track_interval=0))
    prompt = text(1, 12)
    # resumes at 11, so its first chunk ends at 27: where the other's reply ends
    longer = prompt + reply(prompt, 15) + text(9, 60)
    record = h.add(prompt, 16)
    for _ in range(14):
        h.step()
    h.add(longer, 2)
    h.close()
    assert len(record.tokens) - 1 == 27
    assert 27 in depths_along(h.cache.tree, record.tokens)


def test_dropping_a_chunk_end_spares_what_took_its_place() -> None:
    """As above, but the end of the chunk has been evicted when the other donates there."""
    h = Driver(make_config(max_prefill_tokens=16, track_interval=0))
    prompt = text(1, 12)
    longer = prompt + reply(prompt, 15) + text(9, 60)
    record = h.add(prompt, 16)
    for _ in range(14):
        h.step()
    h.add(longer, 2)
    h.step()
    assert record.reason is None
    assert 27 in depths_along(h.cache.tree, longer)
    while 27 in depths_along(h.cache.tree, longer):
        slot = h.cache.tree.evict_state()
        assert slot is not None
        h.cache.states.evict(slot)
    h.close()
    assert 27 in depths_along(h.cache.tree, record.tokens)


def pin(h: Driver, prompt: list[int]) -> None:
    request = Request(
        request_id="pin",
        prompt_token_ids=pack(prompt),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
        pin=True,
    )
    h.records["pin"] = Record(list(prompt), 1, h.scheduler.add(request))
    h.run()


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (40, {"kv_slots": 64, "max_context": 60, "max_requests": 2, "states": 4}),
        (10, {"kv_slots": 64, "max_context": 60, "max_requests": 1, "states": 1}),
    ],
)
def test_a_pin_never_stops_the_queue(prompt: int, options: dict[str, object]) -> None:
    h = Driver(make_config(**options))
    pin(h, text(1, 30))
    with contextlib.suppress(CapacityError):
        h.add(text(2, prompt), 4)
    h.run()
    h.add(text(2, 10), 4)
    h.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_is_pinned_outlives_everybody(chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            kv_slots=260,
            max_context=220,
            max_requests=2,
            states=5,
            max_prefill_tokens=chunk,
            overlap=overlap,
        )
    )
    warm = text(1, 30)
    pin(h, warm)
    for turn in range(5):
        h.serve(text(10 + turn, 150), 9)
    h.cache.flush()
    assert 30 in depths_along(h.cache.tree, warm)
    assert cached(h.serve([*warm, 7, 8], 2)) == (30, 30)
    h.close()


@pytest.mark.parametrize(
    ("n", "chunk", "every", "shared"), [(5, 1, 3, 1), (7, 2, 2, 2), (7, 1, 3, 3), (9, 2, 3, 2)]
)
def test_two_that_take_each_others_donation_both_get_on(
    n: int, chunk: int, every: int, shared: int
) -> None:
    """Preempted in turn, each found its donation evicted or moved away by the other."""
    h = Driver(
        make_config(
            max_requests=2,
            states=2,
            kv_slots=81,
            max_context=80,
            overlap=True,
            force_preempt_every=every,
            max_prefill_tokens=chunk,
            track_interval=0,
            min_gain=1,
            max_checkpoints=1,
        )
    )
    base = text(1, 20)
    h.add(base, 6)
    h.add(base[:shared] + text(2, n - shared), 1)
    for _ in range(300):
        h.step()
    assert not h.scheduler.has_work
    h.close()


def test_no_cap_loses_the_prompts_end() -> None:
    try:
        h = Driver(make_config(max_checkpoints=0))
    except ConfigError:
        return
    h.serve(text(1, 50), 1)
    assert cached(h.serve(text(1, 50), 1)) == (49, 49)


def test_small_turns_add_up_to_a_gain() -> None:
    result = plan_candidates(
        num_prompt_tokens=400,
        num_cached_tokens=0,
        num_kv_tokens=0,
        boundaries=[Boundary(20 * i, BoundaryKind.TURN) for i in range(1, 15)],
        min_gain=Settings().min_gain,
        max_checkpoints=Settings().max_checkpoints,
    )
    assert sum(c.is_urgent for c in result) > 1

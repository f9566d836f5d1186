"""C8, W8: a pool that fills up while decoding, and preemption forced by a setting."""

from __future__ import annotations

import pytest

from tests.support.drive import CHUNKS, Driver, computed, text
from tests.support.harness import make_config


@pytest.mark.plain_steps
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("interval", [1, 8])
def test_tracks_are_saved_exactly_at_the_multiples(interval: int, overlap: bool) -> None:
    h = Driver(make_config(track_interval=interval, overlap=overlap))
    h.serve(text(1, 21), 30)
    saves = [save.depth for batch in h.runner.log[1:] for save in batch.saves]
    assert saves == [d for d in range(22, 21 + 30) if d % interval == 0]
    h.close()


def repeated(h: Driver) -> int:
    """Positions computed more often than a run without preemption would have."""
    needed = sum(
        len(r.tokens) - 1 - r.state.num_cached_tokens for r in h.records.values() if r.output
    )
    return computed(h) - needed


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("donate", ["always", "never"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_c8_decode_until_the_pool_is_full(chunk: int, donate: str, overlap: bool) -> None:
    h = Driver(
        make_config(
            max_prefill_tokens=chunk,
            kv_slots=150,
            states=20,
            max_requests=4,
            max_context=140,
            track_interval=8,
            preempt_donate=donate,
            overlap=overlap,
        )
    )
    records = [h.add(text(i, 15 + i), 80) for i in range(4)]
    h.close()
    assert h.scheduler.counters.preemptions > 0
    assert records[0].state.num_admissions == 1, "the oldest always goes on"
    if repeated(h) > 4 * h.scheduler.counters.preemptions:
        assert h.cache.counters.evicted_states > 0
        assert h.cache.counters.evicted_kv > 0


@pytest.mark.plain_steps
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_c8_preempted_every_few_steps(chunk: int, every: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, force_preempt_every=every, overlap=overlap))
    for i in range(3):
        h.add(text(i, 40 * i + 5), 12)
    h.close()
    assert h.scheduler.counters.preemptions > 0
    if not overlap:
        assert repeated(h) == 0, "every donation survived"


@pytest.mark.plain_steps
@pytest.mark.parametrize(
    ("overlap", "chunk"),
    [(False, 0), (True, 0), (False, 128), (True, 128), (False, 16), (True, 16)],
)
@pytest.mark.parametrize("at", [300, 617, 999])
@pytest.mark.parametrize(("interval", "most"), [(256, 255), (1, 0), (0, None)])
def test_w8_what_a_preemption_without_donation_costs(
    interval: int, most: int | None, at: int, chunk: int, overlap: bool
) -> None:
    h = Driver(
        make_config(
            track_interval=interval,
            preempt_donate="never",
            force_preempt_every=at,
            max_prefill_tokens=chunk,
            overlap=overlap,
            max_context=1100,
            kv_slots=2048,
        ),
        is_checking=False,
    )
    record = h.serve(text(1, 50), 1000)
    preemptions = 999 // at
    assert record.state.num_admissions == 1 + preemptions
    if most is not None:
        assert repeated(h) <= most * preemptions
    if preemptions == 1:
        reached = 50 + at - (-(-50 // chunk) if chunk else 1)
        lost = reached % interval if interval else reached - 49
        assert repeated(h) == lost, "without tracks the prompt's checkpoint still serves"
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_preempted_request_keeps_its_place(chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            max_requests=2, force_preempt_every=4, max_prefill_tokens=chunk, overlap=overlap
        )
    )
    one, two, three = (h.add(text(i, 20), 40) for i in range(3))
    h.run(until=lambda: three.state.num_admissions > 0)
    assert h.scheduler.counters.preemptions > 2
    assert one.reason or two.reason, "who came later waits for a row"
    h.close()


def test_an_aborted_request_that_was_preempted_is_gone() -> None:
    h = Driver(make_config(max_requests=1, states=2, force_preempt_every=2, overlap=True))
    for ahead in (1, 2, 3):
        record = h.add(text(ahead, 20), 30)
        for _ in range(ahead * 2):
            h.begin()
        h.abort(record)
        h.drain()
    h.close()

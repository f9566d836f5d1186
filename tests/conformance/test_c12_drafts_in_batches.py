"""C10, C12, C14, C15, C8 with drafts: rounds beside prefills, beside each other, and cut short."""

from __future__ import annotations

import itertools

import pytest

from hyradix.cache.invariants import check_idle
from hyradix.request import FinishReason
from tests.support.drive import CHUNKS, DRAFTS, Driver, cached, text
from tests.support.fake_drafts import GivenDrafts, chain
from tests.support.harness import make_config

every_mode = pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
all_chunks = pytest.mark.parametrize("chunk", CHUNKS)
both = pytest.mark.parametrize("overlap", [False, True])

NONE, SOME, ALL = chain(0, 0), chain(2, 1), chain(4, 4)


@both
@all_chunks
@every_mode
def test_c12_none_some_and_all_in_one_batch(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    h = Driver(make_config(**drafts, max_prefill_tokens=chunk, overlap=overlap))
    h.runner.drafts = GivenDrafts(itertools.cycle([NONE, SOME, ALL, SOME, NONE, NONE, ALL]))
    for i in range(3):
        h.add(text(i, 20 + i), 40)
    h.close()
    mixed = [
        output
        for batch, output in zip(h.runner.log, h.runner.outputs, strict=True)
        if len(set(output.num_nodes.tolist())) > 1 and (batch.max_nodes > 1).all()
    ]
    assert len(mixed) > 3, "nodes of different numbers in one step"
    assert any(len(set(output.num_tokens.tolist())) > 1 for output in mixed)


@both
@all_chunks
@every_mode
def test_c14_prefills_beside_rounds_are_no_drafts(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    h = Driver(make_config(**drafts, max_prefill_tokens=chunk, overlap=overlap))
    h.runner.drafts = GivenDrafts(itertools.repeat(ALL))
    decoding = h.add(text(1, 10), 150)
    h.run(until=lambda: bool(decoding.output))
    before = len(h.runner.log)
    others = [h.add(text(2 + i, n), 1) for i, n in enumerate([1, 37, 2, 70, 16, 17])]
    h.run(until=lambda: all(other.output for other in others))
    beside = 0
    for batch, output in zip(h.runner.log[before:], h.runner.outputs[before:], strict=False):
        is_prefill = batch.max_nodes == 0
        beside += bool(is_prefill.any() and (batch.max_nodes > 1).any())
        assert (batch.max_accepted[is_prefill] == 1).all()
        prefills = set(batch.rows[is_prefill].tolist())
        for at, row in enumerate(output.rows.tolist()):
            if row in prefills:
                assert (output.num_tokens[at], output.num_nodes[at]) == (1, 1)
    assert beside > 0
    assert h.scheduler.counters.draft_rounds > 0
    h.close()


@both
@all_chunks
@every_mode
def test_c10_a_prefill_of_exactly_one_token_is_none_either(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    for n in (64, 96, 192):
        h = Driver(
            make_config(**drafts, max_prefill_tokens=chunk, track_interval=96, overlap=overlap)
        )
        whole = text(n, n + 1)
        h.serve(whole[:n], 1)
        before = len(h.runner.log)
        record = h.serve(whole, 20)
        assert cached(record) == (n, n)
        prefill = h.runner.log[before]
        assert (prefill.starts.tolist(), prefill.num_tokens.tolist()) == ([n], [1])
        assert (prefill.max_nodes.tolist(), prefill.max_accepted.tolist()) == ([0], [1])
        assert h.runner.log[before + 1].max_nodes.tolist()[0] > 1
        h.close()


@both
@pytest.mark.parametrize("chunk", [16])
@every_mode
def test_c15_a_hundred_clients_leave_while_their_drafts_are_verified(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    h = Driver(
        make_config(
            **drafts,
            max_prefill_tokens=chunk,
            kv_slots=170,
            states=5,
            max_requests=2,
            max_context=80,
            track_interval=3,
            overlap=overlap,
        )
    )
    base = text(1, 30)
    verifying = 0
    for turn in range(100):
        record = h.add(base + text(turn % 7, 10), 20)
        other = h.add(base[: turn % 29 + 1] + text(100 + turn, 3), 9) if turn % 3 == 0 else None
        h.run(until=lambda r=record, t=turn: len(r.output) > t % 5)
        h.begin()
        verifying += record.state.has_drafts_in_flight
        h.abort(record)
        h.abort(record)
        assert record.reason is FinishReason.ABORT
        h.drain()
        check_idle(h.cache)
        h.check_contents()
        assert other is None or other.reason is FinishReason.LENGTH
    assert verifying > 60
    h.close()


@both
@pytest.mark.parametrize("every", [1, 2, 3])
@every_mode
def test_c8_preempted_every_few_rounds(
    drafts: dict[str, object], every: int, overlap: bool
) -> None:
    h = Driver(make_config(**drafts, force_preempt_every=every, overlap=overlap))
    records = [h.add(text(i, 40 * i + 5), 25) for i in range(3)]
    h.close()
    assert h.scheduler.counters.preemptions > 0
    again = sum(int(batch.num_tokens[batch.max_nodes == 0].sum()) for batch in h.runner.log) - sum(
        len(r.prompt) for r in records
    )
    readmissions = sum(r.state.num_admissions - 1 for r in records)
    if not overlap:
        assert again == readmissions, "one token each: every donation survived"


@both
@all_chunks
@every_mode
def test_c8_a_pool_that_is_full(drafts: dict[str, object], chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            **drafts,
            max_prefill_tokens=chunk,
            kv_slots=150,
            states=20,
            max_requests=4,
            max_context=140,
            track_interval=8,
            overlap=overlap,
        )
    )
    records = [h.add(text(i, 15 + i), 80) for i in range(4)]
    h.close()
    assert h.scheduler.counters.preemptions > 0
    assert records[0].state.num_admissions == 1, "the oldest always goes on"
    assert h.scheduler.counters.draft_rounds > 0

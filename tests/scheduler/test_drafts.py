"""Rounds as the scheduler plans them: their slots, their place among steps in flight, their end."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hyradix.request import FinishReason, StepOutput
from hyradix.scheduler.drafting import Drafting
from hyradix.scheduler.request_state import RequestState
from tests.support.drive import CHUNKS, DEFERRED, DRAFTS, Driver, text
from tests.support.fake_drafts import GivenDrafts, chain
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along

every_mode = pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
both = pytest.mark.parametrize("overlap", [False, True])


def decoding(h: Driver, n: int, max_tokens: int, seed: int = 1) -> Record:
    """A request whose first token is known; nothing is in flight."""
    record = h.add(text(seed, n), max_tokens)
    h.run(until=lambda: bool(record.output))
    while h.num_in_flight:
        h.end()
    return record


class NoDrafts(Drafting):
    """Never worth it."""

    def limit(self, state: RequestState) -> tuple[int, int]:
        return 1, 1


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("drafts", [{"decode_log": 8}, *DRAFTS.values()], ids=["log", *DRAFTS])
def test_rows_without_drafts_overlap(drafts: dict[str, object], ahead: int) -> None:
    h = Driver(make_config(**drafts, overlap=True))
    h.scheduler._rows._drafting = NoDrafts(None)
    record = decoding(h, 20, 30)
    known = 20 + len(record.output)
    for depth in range(1, ahead + 2):
        batch = h.begin()
        if "replay" in str(drafts) and depth > 2:
            assert batch is None, "its state would move past what may be cut off"
            break
        assert batch is not None
        assert batch.starts.tolist() == [known + depth - 2]
        assert batch.max_nodes.tolist() == [1]
    h.close()


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_round_in_flight_holds_up_nobody_else(drafts: dict[str, object]) -> None:
    h = Driver(make_config(**drafts, overlap=True))
    one = decoding(h, 20, 60)
    first = h.begin()
    assert first is not None
    assert first.max_nodes.tolist()[0] > 1
    assert h.begin() is None, "its next position is not known"
    two = h.add(text(2, 9), 40)
    second = h.begin()
    assert second is not None
    assert second.max_nodes.tolist() == [0]
    h.end()
    third = h.begin()
    assert third is not None
    assert third.rows.tolist() == first.rows.tolist()
    assert third.starts[0] == first.starts[0] + h.runner.outputs[-1].num_tokens[0]
    h.close()
    assert (one.reason, two.reason) == (FinishReason.LENGTH, FinishReason.LENGTH)


@both
@pytest.mark.parametrize("chunk", CHUNKS)
@every_mode
def test_drafts_never_cost_anybody_a_slot(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    """A pool that holds exactly the tokens of all: without drafts nobody is preempted."""
    for spare in (0, 1, 5):
        h = Driver(
            make_config(
                **drafts,
                kv_slots=3 * 60 + spare,
                max_context=60,
                max_requests=3,
                prefix_cache=False,
                max_prefill_tokens=chunk,
                overlap=overlap,
            )
        )
        for i in range(6):
            h.add(text(i, 20 + i), 60)
        h.close()
        assert h.scheduler.counters.preemptions == 0
        assert h.scheduler.counters.draft_rounds > 0


def test_slots_of_nodes_are_given_up_before_anybody_is_preempted() -> None:
    h = Driver(
        make_config(
            **DRAFTS["tree snapshot"], kv_slots=64, max_context=64, max_requests=2, states=4
        )
    )
    h.runner.drafts = GivenDrafts(itertools.repeat(chain(3, 0)))
    one, two = h.add(text(1, 10), 21), h.add(text(2, 10), 21)
    h.run(until=lambda: len(two.output) > 15)
    assert h.scheduler.counters.preemptions == 0
    assert h.scheduler.counters.draft_rounds > 0
    h.close()
    assert h.scheduler.counters.preemptions == 0, "31 tokens each in 64 slots"
    assert one.reason is FinishReason.LENGTH


class FirstOnly(Drafting):
    """Drafts for the oldest request alone."""

    def limit(self, state: RequestState) -> tuple[int, int]:
        return super().limit(state) if state.arrival == 1 else (1, 1)


@pytest.mark.parametrize("num_right", [0, 1, 2])
@pytest.mark.parametrize("kv_slots", range(60, 68))
def test_drafts_hold_nobody_up_while_there_are_slots_for_tokens(
    kv_slots: int, num_right: int
) -> None:
    h = Driver(
        make_config(
            **DRAFTS["chain snapshot"],
            kv_slots=kv_slots,
            max_context=60,
            max_requests=2,
            prefix_cache=False,
        )
    )
    h.scheduler._rows._drafting = FirstOnly(h.config.spec)
    h.runner.drafts = GivenDrafts(itertools.repeat(chain(4, num_right)))
    states = [h.add(text(i, 10), 50).state for i in range(2)]
    steps = 0
    h.step()
    while all(s.num_computed_tokens for s in states):
        if sum(s.num_computed_tokens + 1 for s in states) > kv_slots:
            break
        batch = h.begin()
        assert batch is not None
        assert batch.num_rows == 2
        assert h.scheduler.counters.preemptions == 0
        h.end()
        steps += 1
    assert steps > 10
    assert h.scheduler.counters.draft_rounds > 0
    h.close()


@both
@pytest.mark.parametrize("kv_slots", [26, 30, 400])
def test_mtp_has_the_slot_of_the_token_that_is_being_sampled(kv_slots: int, overlap: bool) -> None:
    h = Driver(
        make_config(**DRAFTS["tree log"], kv_slots=kv_slots, max_context=26, overlap=overlap)
    )
    record = h.add(text(1, 10), 16)
    lacking = 0
    while h.scheduler.has_work:
        batch = h.begin()
        if batch is not None and batch.num_rows:
            (planned,) = h.scheduler._in_flight[-1].planned
            if planned.samples and planned.end < record.state.max_total_tokens:
                assert record.state.holding is not None
                lacking += record.state.holding.num_slots <= planned.end
        while h.num_in_flight > int(overlap and batch is not None):
            h.end()
    assert lacking == 0, "all of them were promised, or free"
    h.close()


@both
@pytest.mark.parametrize("drafts", [{"decode_log": 4}, *DEFERRED.values()], ids=["log", *DEFERRED])
def test_a_step_of_folds_alone(drafts: dict[str, object], overlap: bool) -> None:
    h = Driver(make_config(**drafts, overlap=overlap))
    record = h.add(text(1, 20), 12)
    h.run(until=lambda: record.reason is not None)
    while h.num_in_flight:
        h.end()
    state = record.state
    assert h.scheduler.has_work
    assert h.scheduler.is_only_settling
    assert depths_along(h.cache.tree, record.tokens)[-1] < 31, "not before it is folded"
    batch = h.begin()
    assert batch is not None
    (fold,) = batch.folds
    assert (batch.num_rows, fold.depth, fold.slot > 0) == (0, 31, True)
    assert state.holding is not None
    assert depths_along(h.cache.tree, record.tokens)[-1] < 31, "nor before that is committed"
    h.end()
    assert not h.scheduler.has_work
    assert depths_along(h.cache.tree, record.tokens)[-1] == 31
    h.close()


@both
@pytest.mark.parametrize("drafts", DEFERRED.values(), ids=DEFERRED)
def test_nothing_is_folded_that_nobody_could_use(drafts: dict[str, object], overlap: bool) -> None:
    h = Driver(
        make_config(**drafts, overlap=overlap, preempt_donate="never", force_preempt_every=5)
    )
    h.serve(text(1, 20), 1)
    assert not any(batch.folds for batch in h.runner.log), "a prompt's state is exact"
    record = h.add(text(2, 20), 30)
    h.run(until=lambda: h.scheduler.counters.preemptions > 0)
    h.abort(record)
    h.close()
    off = Driver(make_config(**drafts, overlap=overlap, prefix_cache=False))
    off.add(text(2, 20), 30)
    off.close()
    assert not any(batch.folds for batch in off.runner.log)


@both
@pytest.mark.parametrize("drafts", DEFERRED.values(), ids=DEFERRED)
def test_aborted_while_it_is_folded_for_a_preemption(
    drafts: dict[str, object], overlap: bool
) -> None:
    h = Driver(make_config(**drafts, overlap=overlap, force_preempt_every=6))
    for moment in range(3):
        record = h.add(text(moment, 20), 60)
        count = h.scheduler.counters.preemptions
        h.run(until=lambda c=count: h.scheduler.counters.preemptions > c)
        for _ in range(moment):
            h.step()
        h.abort(record)
        h.drain()
        assert record.reason is FinishReason.ABORT
    h.close()


@both
@every_mode
def test_a_faulty_round_ends_its_request_alone(drafts: dict[str, object], overlap: bool) -> None:
    h = Driver(make_config(**drafts, overlap=overlap, track_interval=2))
    bad, good = h.add(text(1, 20), 30), h.add(text(2, 20), 30)
    collect = h.runner.collect

    def spoiled() -> StepOutput:
        output = collect()
        assert bad.state.holding is not None
        is_bad = (output.rows == bad.state.holding.row) & (len(bad.output) > 3)
        if not is_bad.any():
            return output
        h.runner.collect = collect  # type: ignore[method-assign]
        return dataclasses.replace(
            output,
            is_faulty=is_bad,
            num_tokens=np.where(is_bad, 0, output.num_tokens).astype(np.int32),
            num_nodes=np.where(is_bad, -5, output.num_nodes).astype(np.int32),
        )

    h.runner.collect = spoiled  # type: ignore[method-assign]
    h.drain()
    assert bad.reason is FinishReason.ERROR
    assert depths_along(h.cache.tree, bad.tokens)[-1] == 19
    assert good.reason is FinishReason.LENGTH
    h.records.pop(bad.state.request_id)
    h.close()


@pytest.mark.parametrize("drafts", [{}, {"decode_log": 4}, *DRAFTS.values()])
def test_a_fault_after_the_client_left_publishes_nothing(drafts: dict[str, object]) -> None:
    h = Driver(make_config(**drafts))
    record = decoding(h, 20, 30)
    h.begin()
    h.abort(record)
    collect = h.runner.collect

    def spoiled() -> StepOutput:
        output = collect()
        return dataclasses.replace(output, is_faulty=np.ones(len(output.rows), np.bool_))

    h.runner.collect = spoiled  # type: ignore[method-assign]
    h.end()
    h.runner.collect = collect  # type: ignore[method-assign]
    assert depths_along(h.cache.tree, record.tokens)[-1] == 19, "what the prompt left"
    h.close()


def test_each_requests_acceptance_is_counted() -> None:
    h = Driver(make_config(**DRAFTS["chain replay"]))
    h.runner.drafts = GivenDrafts([chain(4, 4), chain(3, 1), chain(0, 0), chain(2, 0)])
    record = h.serve(text(1, 20), 30)
    state, counters = record.state, h.scheduler.counters
    assert (counters.draft_rounds, counters.draft_tokens, counters.accepted_tokens) == (3, 9, 5)
    assert (state.num_draft_tokens, state.num_accepted_tokens) == (9, 5)
    assert state.num_draft_rounds == 3, "a round for which nothing was found is none"
    h.close()


def test_nobody_is_followed_for_being_admitted_first() -> None:
    """Whom others join at once is judged by how many there will be."""
    options: dict[str, object] = {"spec": "mtp", "max_requests": 32, "max_context": 256}
    for count in (1, 32):
        h = Driver(make_config(**options))
        for i in range(count):
            h.add(text(i, 9), 4)
        batch = h.begin()
        assert batch is not None
        assert batch.is_followed.tolist() == [count == 1] * count
        h.end()
        h.close()

"""C16, C17, C18, C21, C22: pools at their smallest, flushing, limits, refusals, no sharing."""

from __future__ import annotations

import numpy as np
import pytest

from hyradix.cache.invariants import check, check_idle
from hyradix.errors import (
    CapacityError,
    ContextLengthError,
    InvalidParameterError,
    QueueFullError,
    RequestError,
)
from hyradix.request import FinishReason, MissReason
from tests.support.drive import CHUNKS, Driver, cached, computed, state_ops, text
from tests.support.harness import make_config
from tests.support.tree_view import all_states


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("spare", [0, 1])
def test_c16_states_at_the_minimum(spare: int, chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            max_requests=4,
            states=4 + spare,
            max_prefill_tokens=chunk,
            overlap=overlap,
            track_interval=4,
        )
    )
    bases = [text(i, 40) for i in range(4)]
    for turn in range(5):
        for i, base in enumerate(bases):
            h.add(base + text(10 * turn + i, 5 + i), 6)
        h.run()
    assert all(r.reason is FinishReason.LENGTH for r in h.records.values())
    assert h.cache.counters.skipped_saves > 0, "what could not be kept is counted"
    h.close()


def test_the_only_slot_is_moved_and_the_next_says_why_it_missed() -> None:
    h = Driver(make_config(max_requests=1, states=1))
    shared = text(1, 40)
    h.serve(shared, 1)
    (slot,) = all_states(h.cache.tree)
    before = len(h.runner.log)
    one = h.add(shared + text(2, 10), 3)
    two = h.add(shared + text(3, 10), 3)
    h.close()
    assert cached(one) == (40, 40)
    assert h.runner.log[before].state_slots.tolist() == [slot]
    assert h.runner.log[before].state_ops == ()
    assert h.cache.counters.moved_states == 1
    assert cached(two) == (0, 40)
    assert two.state.miss_reason is MissReason.EVICTED
    assert len(state_ops(h, before)) == 1, "only the second, and it is a clear"


def test_a_state_that_two_hold_in_one_step_is_not_moved() -> None:
    h = Driver(make_config(max_requests=2, states=2))
    shared = text(1, 40)
    h.serve(shared, 1)
    one, two = h.add(shared + text(2, 10), 6), h.add(shared + text(3, 10), 6)
    h.step()
    assert h.scheduler.num_running == 1
    h.close()
    assert cached(one) == (40, 40)
    assert cached(two) == (40, 40)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_track_that_this_step_writes_is_not_reclaimed(overlap: bool) -> None:
    """Two come at once: the prompt's state goes to one, the OLDER track to the other."""
    h = Driver(make_config(max_requests=3, states=4, track_interval=1, overlap=overlap))
    h.add(text(1, 20), 30)
    for _ in range(6):
        h.step()
    later = [h.add(text(2 + i, 20), 3) for i in range(2)]
    h.step()
    assert h.scheduler.num_running == 3
    h.close()
    assert all(r.reason is FinishReason.LENGTH for r in later)


def test_the_end_of_a_chunk_evicts_nothing() -> None:
    h = Driver(make_config(max_requests=1, states=4, max_prefill_tokens=16))
    one, two = text(1, 12), text(2, 12)
    h.serve(one, 1)
    h.serve(two, 1)
    before = h.cache.counters.evicted_states
    h.serve(text(3, 100), 1)
    assert h.cache.counters.evicted_states - before == 2, "the working state and the prompt's end"
    assert h.cache.counters.skipped_saves > 0
    assert cached(h.serve([*two, 5, 6, 7], 1)) == (12, 12)
    h.close()


@pytest.mark.parametrize("n", [1, 2, 20, 39])
@pytest.mark.parametrize("chunk", [0, 1, 16])
def test_a_pool_exactly_as_large_as_one_request(n: int, chunk: int) -> None:
    h = Driver(
        make_config(kv_slots=40, max_context=40, max_requests=2, states=2, max_prefill_tokens=chunk)
    )
    for turn in range(4):
        h.add(text(turn % 2, n), 40 - n)
    h.close()
    assert all(len(r.output) == 40 - n for r in h.records.values())


def test_kv_that_rows_share_outlives_its_eviction_pressure() -> None:
    h = Driver(make_config(kv_slots=120, max_context=110, states=12, max_requests=2))
    shared = text(1, 30)
    h.serve(shared, 1)
    one = h.add(shared + text(2, 5), 60)
    for turn in range(8):
        h.add(text(10 + turn, 20), 2)
    h.close()
    assert cached(one) == (30, 30)
    assert h.cache.counters.evicted_kv > 0


class TestFlush:
    """C17."""

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_idle(self, chunk: int, overlap: bool) -> None:
        h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
        for i in range(3):
            h.serve(text(i, 30), 3)
        h.cache.flush()
        check_idle(h.cache)
        assert (h.cache.tree.num_tokens, h.cache.tree.num_states) == (0, 0)
        assert h.cache.kv.num_free == h.cache.kv.num_total
        assert cached(h.serve(text(0, 30), 3)) == (0, 0)
        h.close()

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_busy(self, chunk: int, overlap: bool) -> None:
        h = Driver(make_config(overlap=overlap, max_prefill_tokens=chunk))
        shared = text(1, 40)
        h.serve(shared, 3)
        h.serve(text(2, 40), 3)
        h.add(shared + text(3, 50), 9)
        h.add(text(2, 40) + text(4, 5), 9)
        while h.scheduler.has_work:
            room = 1 if h.begin() is not None and overlap else 0
            h.cache.flush()
            check(h.cache)
            while h.num_in_flight > room:
                h.end()
        h.close()


class TestLimits:
    """C18 without drafts."""

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("max_tokens", [9, 10, 11, 500])
    def test_max_context_is_a_clean_end(self, max_tokens: int, chunk: int, overlap: bool) -> None:
        h = Driver(
            make_config(max_context=150, kv_slots=300, max_prefill_tokens=chunk, overlap=overlap)
        )
        record = h.add(text(2, 140), max_tokens)
        h.close()
        assert record.reason is FinishReason.LENGTH
        assert len(record.output) == min(max_tokens, 10)
        assert all((b.starts + b.num_tokens <= 150).all() for b in h.runner.log)


class TestRefusals:
    """C21: at once, with what it needs and what there is; nothing else is changed."""

    def harness(self) -> Driver:
        return Driver(make_config(kv_slots=40, max_context=64, max_queue=2, max_requests=1))

    def test_more_than_the_pool(self) -> None:
        h = self.harness()
        with pytest.raises(CapacityError, match=r"\b41\b.*\b40\b") as error:
            h.add(text(1, 30), 11)
        assert error.value.param == "max_tokens"
        assert error.value.status == 400
        assert h.serve(text(1, 30), 10).reason is FinishReason.LENGTH
        h.close()

    def test_longer_than_the_context(self) -> None:
        h = self.harness()
        with pytest.raises(ContextLengthError, match=r"\b64\b.*\b64\b"):
            h.add(text(1, 64), 1)
        assert not h.scheduler.has_work

    @pytest.mark.parametrize("prompt", [[], [-1], [50_000], [5, 2**31 - 1]])
    def test_what_is_no_prompt(self, prompt: list[int]) -> None:
        h = self.harness()
        with pytest.raises(InvalidParameterError):
            h.add(prompt, 1)
        assert not h.scheduler.has_work

    @pytest.mark.parametrize(
        "wrong", [{"min_tokens": 9}, {"min_tokens": -1}, {"top_p": 0.0}, {"stop_token_ids": [-4]}]
    )
    def test_bad_sampling(self, wrong: dict[str, object]) -> None:
        h = self.harness()
        with pytest.raises(RequestError) as error:
            h.add(text(1, 4), 3, **wrong)
        assert error.value.param == next(iter(wrong))

    def test_the_queue_has_an_end(self) -> None:
        h = self.harness()
        h.add(text(1, 4), 1)
        h.add(text(2, 4), 1)
        with pytest.raises(QueueFullError) as error:
            h.add(text(3, 4), 1)
        assert error.value.status == 429
        h.close()

    def test_an_id_in_use(self) -> None:
        h = self.harness()
        request = h.add(text(1, 4), 2).state.request
        with pytest.raises(InvalidParameterError, match="in use"):
            h.scheduler.add(request)
        h.close()
        h.scheduler.add(request)
        assert h.scheduler.num_waiting == 1, "an id is free again when its request is over"


@pytest.mark.plain_steps
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_c22_without_sharing_the_cache_costs_no_step(chunk: int, overlap: bool) -> None:
    runs = []
    for is_on in (True, False):
        h = Driver(
            make_config(
                prefix_cache=is_on,
                max_prefill_tokens=chunk,
                kv_slots=600,
                states=8,
                max_requests=4,
                overlap=overlap,
            )
        )
        records = [h.add(text(i, 20 + 17 * i), 5 + i) for i in range(12)]
        h.close()
        runs.append(([r.output for r in records], len(h.runner.log), computed(h)))
        assert all(cached(r) == (0, 0) for r in records)
        assert {r.state.miss_reason for r in records} == {MissReason.COLD}
    assert runs[0] == runs[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_c11_nothing_but_padding_names_the_sink(chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            max_requests=3,
            states=3,
            kv_slots=390,
            max_context=180,
            track_interval=3,
            max_prefill_tokens=chunk,
            overlap=overlap,
        )
    )
    for i in range(9):
        h.add(text(i % 4, 20 + i + 120 * (i % 2)), 6)
    h.close()
    for batch in h.runner.log:
        assert (batch.state_slots > 0).all()
        assert all(op.destination > 0 for op in batch.state_ops)
        assert all(save.slot > 0 for save in batch.saves)
        assert all(np.min(u.values, initial=1) > 0 for u in batch.kv_updates)

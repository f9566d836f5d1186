"""C6, C7, C15: states being written, prefixes being computed, and clients that leave meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hyradix.cache.invariants import check_idle
from hyradix.request import FinishReason, MissReason
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along, states_along


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("chunk", [128, 16])
def test_c6_an_aborted_prefill_leaves_only_what_is_committed(
    chunk: int, num_chunks: int, is_committed: bool, overlap: bool
) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    prompt = text(1, 6 * chunk + 5)
    first = h.add(prompt, 4)
    for _ in range(num_chunks - 1):
        h.begin()
        h.end()
    h.begin()
    if is_committed:
        h.end()
    expected = (num_chunks if is_committed else num_chunks - 1) * chunk
    h.abort(first)
    assert first.reason is FinishReason.ABORT
    assert depths_along(h.cache.tree, prompt) == ([expected] if expected else [])
    again = h.add(prompt, 4)
    h.begin()
    if not is_committed:
        h.end()
    if is_committed or not h.scheduler.num_running:
        assert cached(again) == (expected, expected)
    h.close()
    assert again.reason is FinishReason.LENGTH


@pytest.mark.parametrize("chunk", [128, 16])
@pytest.mark.parametrize("ahead", [1, 2])
def test_c6_with_steps_in_flight_the_same_prefix_sent_at_once(ahead: int, chunk: int) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=True))
    prompt = text(1, 5 * chunk + 7)
    first = h.add(prompt, 4)
    for _ in range(ahead + 1):
        h.begin()
    h.end()
    h.abort(first)
    again = h.add(prompt, 4)
    h.begin()
    assert cached(again) == (chunk, chunk), "one step is committed; the others are not"
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [0, 128])
def test_an_abort_between_the_step_that_saves_and_its_commit_publishes_nothing(
    chunk: int, overlap: bool
) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    prompt = text(1, 50)
    record = h.add(prompt, 4)
    h.begin()
    (save,) = h.runner.log[-1].saves
    assert save.depth == 49
    h.abort(record)
    assert states_along(h.cache.tree, prompt) == {}
    assert h.cache.tree.num_tokens == 0
    h.end()
    assert record.output == []
    assert 49 not in depths_along(h.cache.tree, prompt), "only the quiet working state, at 50"
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("tail", [0, 1, 40])
@pytest.mark.parametrize("shared", [8, 33, 200])
def test_c7_one_prefix_twice_in_one_step(shared: int, tail: int, chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    base = text(1, shared)
    one = h.add(base + text(2, tail), 5)
    two = h.add(base + text(3, tail), 2)
    h.close()
    for batch in h.runner.log:
        written = {save.slot for save in batch.saves} | set(batch.state_slots.tolist())
        assert not written & {op.source for op in batch.state_ops if op.source}
    assert one.state.num_cached_tokens == 0
    expected = shared if tail else shared - 1
    if tail == 0 and expected >= h.config.min_gain:
        assert expected - two.state.num_cached_tokens < h.config.min_gain, "it waited for that"
        assert two.state.miss_reason is MissReason.NONE
    assert len(one.output) == 5


def test_identical_prompts_with_different_limits_at_once() -> None:
    h = Driver(make_config())
    prompt = text(1, 20)
    records = [h.add(prompt, limit) for limit in (1, 7, 3, 1)]
    h.close()
    assert [len(r.output) for r in records] == [1, 7, 3, 1]
    assert h.cache.tree.num_tokens == 20 + 6, "duplicates were given back"


class TestWaitingForAPrefix:
    """The second waits until the first has passed what they share."""

    def both(self, **options: object) -> tuple[Driver, Record, Record]:
        h = Driver(make_config(max_prefill_tokens=16, **options))
        shared = text(1, 150)
        one, two = h.add(shared + text(2, 50), 3), h.add(shared + text(3, 50), 3)
        for _ in range(3):
            h.step()
        return h, one, two

    def test_the_provider_is_aborted(self) -> None:
        h, one, two = self.both()
        h.abort(one)
        h.close()
        assert two.state.num_cached_tokens == 48, "what it left when it went"

    def test_the_one_who_waits_is_aborted(self) -> None:
        h, one, two = self.both()
        h.abort(two)
        h.close()
        assert (one.reason, two.reason) == (FinishReason.LENGTH, FinishReason.ABORT)

    def test_no_slot_for_the_state_ends_the_wait(self) -> None:
        h, one, two = self.both(states=2, max_requests=2)
        h.close()
        assert two.reason is FinishReason.LENGTH
        assert one.reason is FinishReason.LENGTH

    def test_others_pass_by(self) -> None:
        h = Driver(make_config())
        shared = text(1, 150)
        h.add(shared, 3)
        waiting = h.add(shared + text(3, 10), 3)
        passing = h.add(text(4, 20), 1)
        h.step()
        assert passing.reason is FinishReason.LENGTH
        assert waiting.state.num_in_flight == 0
        assert waiting.output == []
        h.close()
        assert waiting.state.num_cached_tokens == 149


def in_queue(h: Driver, record: Record) -> bool:
    return True


def matched(h: Driver, record: Record) -> bool:
    h.begin()
    return True


def between_chunks(h: Driver, record: Record) -> bool:
    h.step()
    h.step()
    return record.output == []


def after_the_first_token(h: Driver, record: Record) -> bool:
    h.run(until=lambda: bool(record.output) or record.reason is not None)
    return True


def while_decoding(h: Driver, record: Record) -> bool:
    h.run(until=lambda: len(record.output) > 2 or record.reason is not None)
    h.begin()
    return True


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    "reach", [in_queue, matched, between_chunks, after_the_first_token, while_decoding]
)
def test_c15_a_hundred_clients_leave(
    reach: Callable[[Driver, Record], bool], chunk: int, overlap: bool
) -> None:
    tail = 130 if chunk == 128 else 30
    h = Driver(
        make_config(
            max_prefill_tokens=chunk,
            kv_slots=tail + 130,
            states=4,
            max_requests=2,
            max_context=tail + 70,
            track_interval=4,
            overlap=overlap,
        )
    )
    base = text(1, 30)
    for turn in range(100):
        record = h.add(base + text(turn % 7, tail), 9)
        other = h.add(base[: turn % 29 + 1] + text(100 + turn, 3), 3) if turn % 3 == 0 else None
        reach(h, record)
        h.abort(record)
        h.abort(record)
        assert record.reason in (FinishReason.ABORT, FinishReason.LENGTH)
        h.drain()
        check_idle(h.cache)
        assert other is None or other.reason is FinishReason.LENGTH
    h.close()
    assert sum(r.reason is FinishReason.ABORT for r in h.records.values()) >= 90


def test_an_abort_of_nobody_is_nothing() -> None:
    h = Driver(make_config())
    assert h.scheduler.abort("who") is None
    record = h.serve(text(1, 5), 1)
    h.abort(record)
    assert record.reason is FinishReason.LENGTH
    h.close()

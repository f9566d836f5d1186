"""C20 without drafts: where a reply ends, and what is kept of it."""

from __future__ import annotations

import dataclasses

import pytest

from hyradix.request import FinishReason
from tests.support.drive import CHUNKS, EOS, Driver, cached, reply, text
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along

N = 140
PROMPT = text(1, N)


def driver(*, eos_at: int | None = None, overlap: bool = False, **options: object) -> Driver:
    """A harness where the ``eos_at``-th token of the reply to ``PROMPT`` is end-of-sequence."""
    config = make_config(overlap=overlap, **options)
    if eos_at is not None:
        token = reply(PROMPT, eos_at)[-1]
        config = dataclasses.replace(config, eos_token_ids=(EOS, token))
    return Driver(config)


def check_kept(h: Driver, record: Record) -> None:
    """Every state on the reply is exact and not deeper than what was kept."""
    along = depths_along(h.cache.tree, record.tokens)
    assert max(along) <= len(record.tokens)
    assert h.cache.tree.num_tokens <= len(record.tokens), "no KV of a token that was cut off"
    again = h.serve([*record.tokens, 7, 8, 9], 3)
    assert again.state.num_cached_tokens == max(along)
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("interval", [0, 1, 4])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("how", ["eos", "stop_token", "stop_string", "max_tokens"])
def test_c20_where_it_ends(how: str, at: int, interval: int, chunk: int, overlap: bool) -> None:
    h = driver(
        eos_at=at if how == "eos" else None,
        overlap=overlap,
        track_interval=interval,
        max_prefill_tokens=chunk,
    )
    options: dict[str, object] = {
        "eos": {},
        "stop_token": {"stop_token_ids": [reply(PROMPT, at)[-1]]},
        "stop_string": {"stop_at": at},
        "max_tokens": {},
    }[how]
    record = h.serve(PROMPT, at if how == "max_tokens" else 20, **options)
    assert record.output == reply(PROMPT, at)
    length = how == "max_tokens"
    assert record.reason is (FinishReason.LENGTH if length else FinishReason.STOP)
    assert record.state.stop_reason == (record.output[-1] if how == "stop_token" else None)
    if not overlap or length:
        assert N + at - 1 in depths_along(h.cache.tree, record.tokens), "at the reply's end"
    check_kept(h, record)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("at", [1, 2, 6, 7])
def test_c20_with_tokens_in_flight_past_the_end(at: int, interval: int, ahead: int) -> None:
    h = driver(eos_at=at, overlap=True, track_interval=interval)
    record = h.add(PROMPT, 30)
    while record.reason is None:
        h.begin()
        while h.num_in_flight > ahead:
            h.end()
    assert record.output == reply(PROMPT, at)
    h.drain()
    along = depths_along(h.cache.tree, record.tokens)
    if ahead == 1:
        assert max(along) == N + at, "the step in flight has consumed just what is kept"
    if interval == 1 and at > ahead:
        assert max(along) >= N + at - ahead, "a track is not far away"
    check_kept(h, record)


def test_ignore_eos_and_min_tokens() -> None:
    h = driver(eos_at=3)
    assert len(h.serve(PROMPT, 8, ignore_eos=True).output) == 8
    for least, length in [(0, 3), (2, 3), (3, 3), (4, 8), (8, 8)]:
        assert len(h.serve(PROMPT, 8, min_tokens=least).output) == length
    stop = reply(PROMPT, 5)[-1]
    record = h.serve(PROMPT, 8, ignore_eos=True, stop_token_ids=[stop], min_tokens=5)
    assert (len(record.output), record.state.stop_reason) == (5, stop)
    h.close()


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    h = driver(eos_at=4)
    assert h.serve(PROMPT, 4).reason is FinishReason.STOP
    h.close()


def test_the_next_turn_resumes_at_the_end_of_a_stopped_reply() -> None:
    h = driver()
    record = h.serve(PROMPT, 30, stop_at=6)
    assert cached(h.serve([*record.tokens, *text(5, 20)], 2)) == (N + 5, N + 5)
    h.close()


class CuttingBack(Driver):
    """A text side that keeps none of the tokens that complete a stop string."""

    def feed(self, state: object, token_ids: list[int], reason: object) -> int | None:
        kept = super().feed(state, token_ids, reason)  # type: ignore[arg-type]
        return None if kept is None else kept - 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_stop_string_that_keeps_none_of_its_token(at: int, overlap: bool) -> None:
    h = CuttingBack(make_config(overlap=overlap, track_interval=1))
    record = h.add(PROMPT, 20, stop_at=at)
    h.drain()
    assert record.reason is FinishReason.STOP
    assert record.output == reply(PROMPT, at)[:-1]
    along = depths_along(h.cache.tree, record.tokens)
    assert N - 1 in along
    assert record.state.num_output_tokens == at - 1
    assert h.cache.tree.num_tokens <= len(record.tokens), "no KV of a token that was cut off"
    assert max(along) <= len(record.tokens)
    h.finish()

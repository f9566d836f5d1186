"""C20, C18 with drafts: where a reply ends inside an accepted run, and what is kept of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hyradix.request import FinishReason
from tests.support.drive import (
    CHUNKS,
    DEFERRED,
    DRAFTS,
    EOS,
    Driver,
    cached,
    reply,
    text,
)
from tests.support.fake_drafts import GivenDrafts, chain
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

N = 40
PROMPT = text(1, N)
ENDINGS = ["eos", "stop_token", "stop_string", "max_tokens"]


def driver(how: str, at: int, **options: object) -> Driver:
    """A harness where every draft is right, and where ``how`` may be end-of-sequence."""
    config = make_config(**options)
    if how == "eos":
        config = dataclasses.replace(config, eos_token_ids=(EOS, reply(PROMPT, at)[-1]))
    h = Driver(config, seed=at)
    h.runner.drafts = GivenDrafts(itertools.repeat(chain(4, 4)))
    return h


def ending(how: str, at: int) -> tuple[int, dict[str, object]]:
    """max_tokens and the options that end the reply to ``PROMPT`` at its token ``at``."""
    stop = {"stop_token_ids": [reply(PROMPT, at)[-1]]}
    options = {"stop_token": stop, "stop_string": {"stop_at": at}}
    return (at if how == "max_tokens" else 20), options.get(how, {})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_c20_the_end_inside_an_accepted_run(
    drafts: dict[str, object], how: str, chunk: int, overlap: bool
) -> None:
    for at, interval in itertools.product([1, 2, 4, 6, 9], [0, 4]):
        h = driver(
            how, at, **drafts, track_interval=interval, max_prefill_tokens=chunk, overlap=overlap
        )
        max_tokens, options = ending(how, at)
        record = h.serve(PROMPT, max_tokens, **options)
        assert record.output == reply(PROMPT, at)
        is_length = how == "max_tokens"
        assert record.reason is (FinishReason.LENGTH if is_length else FinishReason.STOP)
        assert record.state.stop_reason == (record.output[-1] if how == "stop_token" else None)
        along = depths_along(h.cache.tree, record.tokens)
        assert max(along) <= len(record.tokens)
        assert h.cache.tree.num_tokens <= len(record.tokens), "no KV of a token that was cut off"
        if drafts in DEFERRED.values() or is_length:
            assert max(along) >= N + at - 1, "at the reply's end"
        again = h.serve([*record.tokens, 7, 8, 9], 3)
        assert again.state.num_cached_tokens == max(along)
        h.close()


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("rows", [2, 3, 16])
def test_the_log_alone_keeps_the_replys_end(rows: int, how: str, ahead: int) -> None:
    """Plain decode through the log, with steps in flight past the end."""
    for at in (1, 2, 3, 7, 20):
        h = driver(how, at, decode_log=rows, overlap=True, track_interval=0)
        max_tokens, options = ending(how, at)
        record = h.add(PROMPT, max(max_tokens, at), **options)
        while record.reason is None:
            room = ahead if h.begin() is not None else 0
            while h.num_in_flight > room:
                h.end()
        h.drain()
        assert record.output == reply(PROMPT, at)
        assert depths_along(h.cache.tree, record.tokens)[-1] >= N + at - 1
        assert at < 7 or 0 < h.runner.row_states.most_logged <= rows
        h.close()


class CuttingBack(Driver):
    """A text side that keeps none of the tokens that complete a stop string."""

    def feed(self, state: object, token_ids: list[int], reason: object) -> int | None:
        kept = super().feed(state, token_ids, reason)  # type: ignore[arg-type]
        return None if kept is None else max(kept - 2, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [{"decode_log": 4}, *DRAFTS.values()], ids=["log", *DRAFTS])
def test_a_stop_string_that_keeps_little_of_its_round(
    drafts: dict[str, object], overlap: bool
) -> None:
    for at in (1, 2, 3, 5, 6, 7):
        h = CuttingBack(make_config(**drafts, overlap=overlap, track_interval=1))
        h.runner.drafts = GivenDrafts(itertools.repeat(chain(4, 4)))
        record = h.add(PROMPT, 20, stop_at=at)
        h.drain()
        assert record.output == reply(PROMPT, at)[: len(record.output)]
        assert len(record.output) < at
        along = depths_along(h.cache.tree, record.tokens)
        assert along[-1] in (len(record.tokens) - 1, len(record.tokens))
        h.finish()


class TestLimits:
    """C18: drafts are left over where the context, or the reply, ends."""

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
    def test_a_clean_end(self, drafts: dict[str, object], chunk: int, overlap: bool) -> None:
        for n, max_tokens, kv_slots in itertools.product((40, 46, 49), (2, 9, 500), (50, 53)):
            h = Driver(
                make_config(
                    **drafts,
                    max_context=50,
                    kv_slots=kv_slots,
                    max_prefill_tokens=chunk,
                    overlap=overlap,
                )
            )
            h.runner.drafts = GivenDrafts(itertools.repeat(chain(4, 4)))
            record = h.add(text(2, n), max_tokens)
            h.close()
            assert record.reason is FinishReason.LENGTH
            assert len(record.output) == min(max_tokens, 50 - n)
            for batch in h.runner.log:
                reach = batch.starts + batch.max_accepted
                assert (reach[batch.max_nodes > 0] < n + len(record.output)).all()
            assert h.scheduler.counters.preemptions == 0

    def test_one_round_to_the_end(self) -> None:
        """Positions 45..48 are consumed for the tokens 46..49: the 50th is the last there is."""
        h = Driver(make_config(**DRAFTS["chain snapshot"], max_context=50, kv_slots=200))
        h.runner.drafts = GivenDrafts(itertools.repeat(chain(4, 4)))
        h.serve(text(2, 45), 500)
        batch = h.runner.log[-1]
        assert (batch.starts.tolist(), batch.max_accepted.tolist()) == ([45], [4])
        assert batch.max_nodes.tolist() == [4], "a chain of more would be of no use"
        assert h.runner.outputs[-1].num_tokens.tolist() == [4]
        h.close()


def test_the_next_turn_resumes_at_the_end_of_a_reply_that_was_cut_inside_a_round() -> None:
    h = driver("stop_string", 4, **DRAFTS["chain log"])
    record = h.serve(PROMPT, 30, stop_at=4)
    assert cached(h.serve([*record.tokens, *text(5, 20)], 2)) == (N + 4, N + 4)
    h.close()

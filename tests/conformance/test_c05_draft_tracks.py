"""C5, W7: periodic saves that a round may or may not reach, at every offset inside its run."""

from __future__ import annotations

import pytest

from tests.support.drive import CHUNKS, DRAFTS, Driver, text
from tests.support.fake_drafts import GivenDrafts, chain
from tests.support.fake_runner import EMPTY
from tests.support.fake_states import consume_all
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along

K = 3
INTERVAL = 16


def after_prefill(h: Driver, prompt: list[int], max_tokens: int = 40, **options: object) -> Record:
    """A request whose prompt is computed and whose first round is next."""
    record = h.add(prompt, max_tokens, **options)
    while not record.output:
        h.begin()
        while h.num_in_flight:
            h.end()
    return record


def tracks(record: Record) -> dict[int, int]:
    """Depth -> slot of the periodic saves that it holds."""
    assert record.state.holding is not None
    assert record.state.holding.pending == [], "a save that nobody wrote is still held"
    return {track.depth: track.slot for track in record.state.holding.tracks}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_c5_the_state_at_exactly_the_boundary(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    for offset in range(1, K + 3):
        for num_right in range(K + 1):
            h = Driver(
                make_config(
                    **drafts,
                    track_interval=INTERVAL,
                    max_prefill_tokens=chunk,
                    overlap=overlap,
                )
            )
            assert h.config.spec is not None
            most = h.config.spec.shape.max_accepted
            h.runner.drafts = GivenDrafts([chain(K, num_right)])
            n = 2 * INTERVAL - offset
            record = after_prefill(h, text(n, n))
            is_planned = offset <= most
            free = h.cache.states.num_free
            batch = h.begin()
            assert batch is not None
            assert [save.depth for save in batch.saves] == [2 * INTERVAL][:is_planned]
            h.end()
            assert len(record.output) == 1 + num_right + 1
            is_reached = offset <= num_right + 1
            assert list(tracks(record)) == [2 * INTERVAL][:is_reached]
            assert h.cache.states.num_free == free - is_reached, "what was not written is free"
            for depth, slot in tracks(record).items():
                assert h.runner.states[slot] == consume_all(EMPTY, record.tokens[:depth])
            h.abort(record)
            h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_c5_every_multiple_that_a_round_may_reach(
    drafts: dict[str, object], chunk: int, overlap: bool
) -> None:
    h = Driver(make_config(**drafts, track_interval=2, max_prefill_tokens=chunk, overlap=overlap))
    h.runner.drafts = GivenDrafts([chain(K, K), chain(K, 0)])
    n = 21
    record = after_prefill(h, text(1, n))
    batch = h.begin()
    assert batch is not None
    assert [save.depth for save in batch.saves] == [
        d for d in range(n + 1, n + int(batch.max_accepted[0]) + 1) if d % 2 == 0
    ]
    h.end()
    assert list(tracks(record)) == [24], "the deepest that was reached"
    batch = h.begin()
    assert batch is not None
    assert [save.depth for save in batch.saves][:2] == [26, 28]
    h.end()
    assert len(record.output) == 6
    assert list(tracks(record)) == [26]
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_c5_a_track_past_the_kept_tokens_replaces_no_older_one(
    drafts: dict[str, object], overlap: bool
) -> None:
    h = Driver(make_config(**drafts, track_interval=4, preempt_donate="never", overlap=overlap))
    h.runner.drafts = GivenDrafts([chain(K, 2), chain(K, 3)])
    record = after_prefill(h, text(1, 21), stop_at=6)  # the second round: 24..27, 28 is cut off
    h.run()
    assert [(s.row, s.depth) for batch in h.runner.log for s in batch.saves if s.depth > 21] == [
        (0, 24),
        (0, 28),
    ]
    assert len(record.output) == 6
    along = depths_along(h.cache.tree, record.tokens)
    assert along[-1] == (24 if "snapshot" in str(drafts) else 27)
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["snapshot", "replay", "log"])
def test_w7_across_256_at_the_second(mode: str, overlap: bool) -> None:
    """T = 4, 2 drafts accepted: 3 nodes consumed, the working state at +3, the track at 256."""
    h = Driver(
        make_config(
            spec="mtp",
            spec_topk=1,
            spec_steps=3,
            spec_nodes=4,
            spec_state=mode,
            overlap=overlap,
        )
    )
    h.runner.drafts = GivenDrafts([chain(3, 2)])
    record = after_prefill(h, text(1, 254))
    batch = h.begin()
    assert batch is not None
    assert (batch.starts.tolist(), batch.num_tokens.tolist()) == ([254], [1])
    assert (batch.max_nodes.tolist(), batch.max_accepted.tolist()) == ([4], [4])
    (save,) = batch.saves
    assert save.depth == 256
    h.end()
    output = h.runner.outputs[-1]
    assert output.num_tokens.tolist() == [3]
    assert output.paths.tolist() == [[0, 1, 2]]
    state, tokens = record.state, record.tokens
    assert (state.num_computed_tokens, state.num_scheduled_tokens, len(tokens)) == (257, 257, 258)
    assert state.holding is not None
    working = h.runner.states[state.holding.working_slot]
    base = 257 if mode == "snapshot" else 254
    assert working == consume_all(EMPTY, tokens[:base])
    assert h.runner.states[save.slot] == consume_all(EMPTY, tokens[:256])
    counters = h.scheduler.counters
    assert (counters.draft_rounds, counters.draft_tokens, counters.accepted_tokens) == (1, 3, 2)
    h.close()

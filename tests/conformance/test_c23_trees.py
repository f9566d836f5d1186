"""C23, W6: trees whose accepted path is not the first child, and where their slots go."""

from __future__ import annotations

import itertools

import pytest

from hyradix.request import slot_order
from tests.support.drive import CHUNKS, MODES, TREE, Driver, row_slots, text
from tests.support.fake_drafts import W6, GivenDrafts, Plan
from tests.support.fake_runner import EMPTY
from tests.support.fake_states import consume_all
from tests.support.harness import Record, make_config

LATE = [
    Plan(W6, (0, 3)),
    Plan(W6, (0, 2, 9)),
    Plan(W6, (0, 1, 6)),
    Plan((-1, 0, 0, 0, 3, 3, 5, 5, 4), (0, 3, 5, 7)),
    Plan((-1, 0, 1, 0, 3, 2, 4), (0, 3, 4, 6)),
]
"""The right children come last."""


def first_round(h: Driver, n: int) -> Record:
    """A prompt of ``n`` tokens is computed; its first round has run."""
    record = h.add(text(1, n), 30)
    while not record.output:
        h.begin()
        while h.num_in_flight:
            h.end()
    h.begin()
    return record


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_c23_the_right_path_is_never_the_first(mode: str, chunk: int, overlap: bool) -> None:
    h = Driver(
        make_config(
            **TREE,
            spec_state=mode,
            max_prefill_tokens=chunk,
            overlap=overlap,
            track_interval=3,
        )
    )
    h.runner.drafts = GivenDrafts(itertools.cycle(LATE))
    records = [h.add(text(i, 20 + 9 * i), 25 + i) for i in range(4)]
    h.close()
    counters = h.scheduler.counters
    assert counters.accepted_tokens > counters.draft_rounds, "most rounds went deep"
    for record in records:
        h.serve([*record.tokens, 5, 6], 6)
    h.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_w6_slots_tokens_and_states_of_the_path(mode: str, seed: int) -> None:
    """The tokens of the other nodes (3 among them) differ with the seed and change nothing."""
    h = Driver(make_config(**TREE, spec_state=mode, track_interval=24), seed=seed)
    h.runner.drafts = GivenDrafts([Plan(W6, (0, 2, 8))])
    n = 21
    record = first_round(h, n)
    state = record.state
    assert state.holding is not None
    row = state.holding.row
    before = h.cache.table.kv_slots[row, : state.holding.num_slots].tolist()
    h.end()
    output = h.runner.outputs[-1]
    assert output.paths.tolist() == [[0, 2, 8]]
    assert output.num_nodes.tolist() == [10]
    order = [0, 2, 8, 1, 3, 4, 5, 6, 7, 9]
    assert slot_order(output.paths[0], 10).tolist() == order
    after = [*before[:n], *(before[n + at] for at in order), *before[n + 10 :]]
    assert h.cache.table.kv_slots[row, : state.holding.num_slots].tolist() == after
    assert row_slots(h, row, len(after)) == after, "on both planes"
    assert state.num_computed_tokens == n + 3
    assert len(record.output) == 4
    (track,) = state.holding.tracks
    assert track.depth == 24
    assert h.runner.states[track.slot] == consume_all(EMPTY, record.tokens[:24])
    h.close()


def test_nothing_is_accepted_from_a_tree_of_wrong_nodes() -> None:
    h = Driver(make_config(**TREE, spec_state="log"))
    h.runner.drafts = GivenDrafts(itertools.repeat(Plan(W6, (0,))))
    record = h.serve(text(1, 30), 12)
    counters = h.scheduler.counters
    assert counters.accepted_tokens == 0
    assert counters.draft_tokens > 8 * counters.draft_rounds, "fewer at the end of the reply"
    assert len(record.output) == 12
    h.close()

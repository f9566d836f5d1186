"""Prompt lookup against the definition; what a row's index remembers."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.spec_config import DraftShape
from hyradix.spec_decode import ngram
from hyradix.spec_decode.ngram import NgramProposer
from hyradix.spec_decode.proposer import DraftRound
from tests.spec_decode.test_beam import paths_of


def ask(proposer, starts, shape, *, max_nodes=99, max_depth=99):
    count = len(starts)
    whole = [np.full(count, value, np.int32) for value in (max_nodes, max_depth)]
    rows = np.arange(count, dtype=np.int32)
    return proposer.propose(DraftRound(rows, np.array(starts, np.int32), *whole, shape))


def continuations(tokens: list[int], depth: int) -> list[list[int]]:
    """What followed the earlier places that agree for longest, the most recent first."""
    end = len(tokens)

    def agreement(place: int) -> int:
        length = 0
        most = min(ngram.MAX_MATCH, place)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    places = [p for p in range(end - 1, 0, -1) if agreement(p) >= 2][: ngram.MAX_PLACES]
    best = max(map(agreement, places), default=0)
    found = []
    for place in places:
        if agreement(place) == best:
            grown = list(tokens)
            for j in range(depth):
                grown.append(grown[place + j])
            found.append(grown[end:])
    return found


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    depth=st.integers(1, 6),
    topk=st.integers(1, 4),
    data=st.data(),
)
def test_the_trie_of_what_followed(tokens, depth, topk, data):
    nodes = depth + 1 if topk == 1 else data.draw(st.integers(depth + 1, 64))
    shape = DraftShape(topk=topk, steps=depth, nodes=nodes)
    proposer = NgramProposer(np.array([tokens], np.int32))
    for cut in data.draw(st.lists(st.integers(1, len(tokens)), max_size=3).map(sorted)):
        ask(proposer, [cut - 1], shape)
    paths = paths_of(ask(proposer, [len(tokens) - 1], shape), 0)
    found = continuations(tokens, depth)
    counts: dict[tuple[int, ...], int] = {}
    for follow in found:
        for length in range(1, depth + 1):
            key = tuple(follow[:length])
            counts[key] = counts.get(key, 0) + 1
    kept = [path[1:] for path in paths]
    assert kept[0] == ()
    assert len(set(kept)) == len(kept) <= nodes
    assert all(path in counts for path in kept[1:])
    scores = [counts[path] * ngram.KEEP ** len(path) for path in kept[1:]]
    assert scores == sorted(scores, reverse=True)
    for path in kept:
        siblings = [key for key in counts if len(key) == len(path) + 1 and key[:-1] == path]
        siblings.sort(key=lambda key: -counts[key])  # made in order of recency: stable
        chosen = [key for key in kept if len(key) == len(path) + 1 and key[:-1] == path]
        assert chosen == siblings[: len(chosen)]
        if len(kept) < nodes:
            assert len(chosen) == min(topk, len(siblings))


def test_limits_and_rows_of_their_own():
    table = np.array([[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5]], np.int32)
    proposer = NgramProposer(table)
    shape = DraftShape(topk=1, steps=4, nodes=5)
    assert ask(proposer, [5, 5], shape).token_ids.tolist() == [2, 3, 4, 1, 2, 5]
    assert ask(proposer, [5, 5], shape, max_depth=2).token_ids.tolist() == [2, 3, 4, 5]
    assert ask(proposer, [5, 5], shape, max_nodes=2).token_ids.tolist() == [2, 3, 5]
    assert ask(proposer, [5, 5], shape, max_nodes=1).token_ids.tolist() == [2, 5]
    assert ask(proposer, [5, 5], shape, max_nodes=0).token_ids.tolist() == [2, 5]


def test_a_row_that_begins_anew_forgets():
    table = np.array([[1, 2, 3, 1, 2, 0]], np.int32)
    proposer = NgramProposer(table)
    shape = DraftShape(topk=1, steps=1, nodes=2)
    assert ask(proposer, [4], shape).token_ids.tolist() == [2, 3]
    table[0] = [9, 1, 2, 8, 1, 2]
    proposer.enter(0, 0, None)
    assert ask(proposer, [5], shape).token_ids.tolist() == [2, 8]


def test_a_repeating_row_goes_on_with_itself():
    proposer = NgramProposer(np.array([[7, 7, 7]], np.int32))
    drafts = ask(proposer, [2], DraftShape(topk=1, steps=5, nodes=6))
    assert drafts.token_ids.tolist() == [7] * 6


def test_cost_does_not_grow_with_the_row():
    tokens = np.random.default_rng(0).integers(0, 60, (1, 8192)).astype(np.int32)
    proposer = NgramProposer(tokens)
    shape = DraftShape(topk=4, steps=7, nodes=32)
    ask(proposer, [8000], shape)
    times = []
    for start in range(8001, 8190):
        began = time.perf_counter()
        ask(proposer, [start], shape)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 1e-3  # a scan of the row in Python would take several

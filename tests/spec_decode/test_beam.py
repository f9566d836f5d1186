"""The beam against its definition: every candidate made, then the best ones taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.kernels.tree_recurrence.topology import check_parents
from hyradix.spec_config import DraftShape
from hyradix.spec_decode.beam import Beam
from hyradix.spec_decode.chain import Chains
from hyradix.spec_decode.drafts import Drafts

VOCAB = 9


def children(path: tuple[int, ...], topk: int, levels: int) -> list[tuple[int, float]]:
    """The best children of a node: its distribution follows from its path. Few levels: ties."""
    generator = np.random.default_rng(hash((path, levels)) % 2**32)
    weights = 1.0 + generator.integers(0, levels, VOCAB)
    logprobs = np.log(weights / weights.sum())
    order = np.argsort(-logprobs, kind="stable")[:topk]
    return [(int(token), float(logprobs[token])) for token in order]


def brute_force(root: int, num_nodes: int, max_depth: int, shape: DraftShape, levels: int):
    """[(path, score)] of what is kept, best first."""
    made = [((root,), 0.0)]
    last = made[:]
    for _ in range(min(max_depth, shape.steps)):
        expanded = sorted(last, key=lambda node: -node[1])[: shape.topk]
        last = [
            ((*path, token), score + logprob)
            for path, score in expanded
            for token, logprob in children(path, shape.topk, levels)
        ]
        made += last
    return sorted(made, key=lambda node: -node[1])[: max(min(num_nodes, shape.nodes), 1)]


def paths_of(drafts: Drafts, tree: int) -> list[tuple[int, ...]]:
    first, last = drafts.cu_nodes[tree : tree + 2]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafts.token_ids[first:last], drafts.parents[first:last], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return paths


shapes = st.builds(
    lambda topk, steps, extra: DraftShape(
        topk=topk, steps=steps, nodes=steps + 1 + (extra if topk > 1 else 0)
    ),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 20),
)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), min_size=1, max_size=5),
    levels=st.sampled_from([1, 2, 50]),
)
def test_the_best_are_kept_and_places_hold_their_ancestors(shape, rows, levels):
    max_nodes, max_depth = (np.array(part, np.int32) for part in zip(*rows, strict=True))
    roots = np.arange(len(rows), dtype=np.int32)
    beam = Beam(roots, max_nodes, max_depth, shape)
    held: dict[tuple[int, int], tuple[int, ...]] = {}
    before: list[tuple[int, ...]] = [()]
    while (frontier := beam.frontier()) is not None:
        paths, ids, logprobs = [], [], []
        for tree, token, parent, places in zip(
            frontier.trees, frontier.token_ids, frontier.parents, frontier.paths, strict=True
        ):
            path = (*before[parent], int(token))
            assert len(path) == frontier.depth + 1
            assert places.max() <= max(min(max_nodes[tree], shape.nodes) - 2, 0)
            held[int(tree), int(places[-1])] = path
            paths.append(path)
            found = children(path, shape.topk, levels)
            ids.append([token for token, _ in found])
            logprobs.append([logprob for _, logprob in found])
        for tree, places, path in zip(frontier.trees, frontier.paths, paths, strict=True):
            at = [held[int(tree), int(place)] for place in places]
            assert at == [path[: d + 1] for d in range(len(path))]
        before = paths
        beam.grow(np.array(ids), np.array(logprobs))
    drafts = beam.finish()
    for tree, (nodes, depth) in enumerate(rows):
        first, last = drafts.cu_nodes[tree : tree + 2]
        check_parents(drafts.parents[first:last].tolist())
        expected = brute_force(tree, nodes, depth, shape, levels)
        assert paths_of(drafts, tree) == [path for path, _ in expected]


def test_a_chain_takes_one_place_after_another():
    shape = DraftShape(topk=1, steps=4, nodes=5)
    beam = Beam(np.array([7], np.int32), *(np.array([9], np.int32) for _ in "nd"), shape)
    seen = []
    while (frontier := beam.frontier()) is not None:
        seen.append(frontier.paths[0].tolist())
        beam.grow(np.array([[len(seen)]]), np.array([[-0.5]]))
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    drafts = beam.finish()
    assert drafts.token_ids.tolist() == [7, 1, 2, 3, 4]
    assert drafts.parents.tolist() == [-1, 0, 1, 2, 3]


def test_what_is_no_probability_is_no_draft():
    shape = DraftShape(topk=2, steps=2, nodes=5)
    five = np.full(2, 5, np.int32)
    beam = Beam(np.zeros(2, np.int32), five, five, shape)
    assert beam.frontier() is not None
    beam.grow(np.array([[3, 4], [5, 6]]), np.array([[np.nan, np.nan], [-1.0, -2.0]]))
    frontier = beam.frontier()
    assert frontier is not None
    assert frontier.trees.tolist() == [1, 1]
    beam.grow(np.array([[1, 2], [1, 2]]), np.full((2, 2), -1.0))
    assert beam.finish().num_nodes.tolist() == [1, 5]


@pytest.mark.parametrize("seed", range(20))
def test_chains_are_beams_of_width_one(seed):
    rng = np.random.default_rng(seed)
    count, shape = 5, DraftShape(topk=1, steps=4, nodes=5)
    roots = rng.integers(0, 9, count).astype(np.int32)
    nodes, depth = (rng.integers(low, 7, count).astype(np.int32) for low in (1, 0))
    both = Beam(roots, nodes, depth, shape), Chains(roots, nodes, depth, shape)
    while True:
        one, other = (grown.frontier() for grown in both)
        assert (one is None) == (other is None)
        if one is None or other is None:
            break
        names = ("depth", "trees", "token_ids", "paths")
        for name in names if one.depth == 0 else (*names, "parents"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        tokens = rng.integers(0, 9, (len(one.trees), 1))
        logprobs = np.where(rng.random(tokens.shape) < 0.15, np.nan, -1.0)
        for grown in both:
            grown.grow(tokens, logprobs)
    one, other = (grown.finish() for grown in both)
    for name in ("cu_nodes", "token_ids", "parents"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name

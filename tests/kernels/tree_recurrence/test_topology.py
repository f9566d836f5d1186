"""Parent tables: what is refused, and what follows from one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyradix.kernels.tree_recurrence.topology import (
    PAD,
    chain_parents,
    check_chain,
    check_parents,
    describe,
    path,
    paths,
)


@st.composite
def trees(draw, max_nodes=20):
    size = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 3), st.randoms())
def test_description_agrees_with_walking_up(rows, padding, random):
    size = max(map(len, rows)) + padding
    padded = [row + [PAD] * (size - len(row)) for row in rows]
    tree = describe(torch.tensor(padded, dtype=torch.int32))
    last = [random.randrange(len(row)) for row in rows]
    index, counts = paths(tree, torch.tensor(last))
    for n, row in enumerate(rows):
        for node in range(size):
            walked = path(row, node) if node < len(row) else []
            assert tree.ancestors[n, node].nonzero().flatten().tolist() == sorted(walked) == walked
            assert tree.depths[n, node] == len(walked) - 1
        assert tree.is_node[n].tolist() == [node < len(row) for node in range(size)]
        assert index[n, : counts[n]].tolist() == path(row, last[n])
    assert tree.max_depth == int(tree.depths.max()) == index.shape[1] - 1


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], r"parents\[0\] must be -1"),
        ([0], r"parents\[0\] must be -1, got \[0\]"),
        ([PAD], r"parents\[0\] must be -1"),
        ([-1, -1], r"parents\[1\] is -1: a parent precedes its child"),
        ([-1, 1], r"parents\[1\] is 1"),
        ([-1, 0, 3, 0], r"parents\[2\] is 3: .* \(0 to 1; -2 for padding\)"),
        ([-1, PAD, 0], "node 2 follows padding"),
        ([-1, -3], r"parents\[1\] is -3"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        check_parents(parents)
    if parents:
        with pytest.raises(ValueError, match=message):
            describe(torch.tensor([parents]))


def test_chains():
    assert chain_parents(3) == [-1, 0, 1]
    assert chain_parents(1, padded_to=3) == [-1, PAD, PAD]
    check_chain(chain_parents(4, padded_to=6))
    with pytest.raises(ValueError, match=r"needs a chain \(topk 1\), but parents\[2\] is 0, not 1"):
        check_chain([-1, 0, 0])


def test_there_is_no_path_to_padding():
    with pytest.raises(ValueError, match="no node 1"):
        path([-1, PAD], 1)

"""The flat form of a step's trees against paths found one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.kernels.tree_recurrence.topology import path
from tests.kernels.tree_recurrence.cases import TOPOLOGIES, tree_of


def flat_of(trees):
    cu = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    return FlatTrees.of(cu, np.concatenate([*trees, []]).astype(np.int32))


def random_trees(seed):
    """A third of them single nodes, one in ten without any."""
    generator = torch.Generator().manual_seed(seed)
    trees = []
    for _ in range(seed % 12 + 1):
        kind, size, fate = torch.randint(1 << 30, (3,), generator=generator).tolist()
        tree = tree_of(TOPOLOGIES[kind % len(TOPOLOGIES)], size % 64 + 1, generator)
        trees.append([] if fate % 10 == 0 else tree)
    return trees


@pytest.mark.parametrize(
    "trees",
    [*map(random_trees, range(40)), [], [[]], [[-1]], [[-1], [-1]], [[-1], []]],
    ids=lambda trees: "-".join(str(len(tree)) for tree in trees),
)
def test_paths_depths_and_offsets(trees):
    flat = flat_of(trees)
    paths = [path(tree, node) for tree in trees for node in range(len(tree))]
    assert flat.num_trees == len(trees)
    assert flat.depths.tolist() == [len(nodes) - 1 for nodes in paths]
    assert flat.path_offsets.tolist() == np.cumsum([0, *map(len, paths)]).tolist()
    assert flat.path_nodes.tolist() == [node for nodes in paths for node in nodes]
    for tree, parents in enumerate(trees):
        for node in range(len(parents)):
            assert flat.path(tree, node).tolist() == path(parents, node)
    for array in (flat.depths, flat.path_offsets, flat.path_nodes):
        assert array.dtype == np.int32
        assert array.flags.writeable  # compiled kernels know no other arrays
        assert array.flags.c_contiguous

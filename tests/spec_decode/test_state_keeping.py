"""Keeping states: working state, tracks, windows and hidden states against plain decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.memory import physical_bytes
from hyradix.kernels.torch_ops import TorchOps
from hyradix.request import StateFold
from hyradix.state_bytes import MODES, spec_bytes
from tests.kernels.tree_recurrence.cases import tree_of
from tests.spec_decode.rounds import HIDDEN, SLOTS, Rounds

BACKENDS = [CompiledOps(), TorchOps()]
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
modes = pytest.mark.parametrize("mode", MODES)
CHAIN = [-1, 0, 1, 2]
RIGHT = [-1, 0, 0, 2, 2, 4, 4, 6]
"""The accepted path is never the first child (C23): 0, 2, 4, 6."""
DEEP = [0, 2, 4, 6]


@backends
@modes
@pytest.mark.parametrize("is_chain", [True, False])
def test_w7_three_nodes_consumed_and_the_boundary_at_the_second(ops, mode, is_chain):
    """W7: working state at +3, the track at exactly the boundary, both equal plain decode."""
    rounds = Rounds(mode, ops, is_chain=is_chain, num_nodes=4)
    rounds.enter(0, 4)
    rounds.round({0: CHAIN}, {0: 2}, [(0, 9, 6), (0, 10, 8)])
    rounds.check(0, 9, 6)
    assert rounds.recurrent[:, 10].isnan().all(), "depth 8 was not reached"
    rounds.settle(0)
    rounds.check(0, 1, 7)
    rounds.check(0, 9, 6)


@backends
@modes
@pytest.mark.parametrize("num_consumed", range(1, 5))
def test_c5_a_boundary_at_each_offset_of_an_accepted_run(ops, mode, num_consumed):
    rounds = Rounds(mode, ops)
    rounds.enter(1, 3)
    saves = [(1, 8 + offset, 3 + offset) for offset in range(1, 5)]
    rounds.round({1: RIGHT}, {1: DEEP[num_consumed - 1]}, [*saves, (2, 20, 4)])
    for _, slot, depth in saves:
        if depth <= 3 + num_consumed:
            rounds.check(1, slot, depth)
        else:
            assert all(pool[..., slot, :].isnan().all() for pool in (rounds.hidden,))
            assert rounds.recurrent[:, slot].isnan().all()
            assert rounds.conv[:, slot].isnan().all()
    assert rounds.recurrent[:, 20].isnan().all(), "a save of a row without a tree"
    rounds.settle(1)
    rounds.check(1, 2, 3 + num_consumed)


@backends
@modes
def test_a_verify_changes_no_byte_of_the_pools(ops, mode):
    rounds = Rounds(mode, ops)
    for row in range(3):
        rounds.enter(row, 2 + row)
    rounds.round({0: RIGHT, 1: CHAIN, 2: [-1]}, {0: 4, 1: 3, 2: 0})
    trees = {2: RIGHT, 0: CHAIN, 1: RIGHT}
    rounds.keeper.begin(
        *(np.array(x, np.int32) for x in ([2, 0, 1], [3, 1, 2], [5, 5, 7], [0] * 3))
    )
    before = [pool.clone().nan_to_num(7) for pool in rounds.pools]
    rounds.verify(trees)
    for pool, old in zip(rounds.pools, before, strict=True):
        assert torch.equal(pool.nan_to_num(7), old)


@backends
@modes
@pytest.mark.parametrize("is_chain", [True, False])
def test_many_rounds_of_many_requests(ops, mode, is_chain):
    """Requests come and go; every round's outputs and every tenth state are plain decode's."""
    rounds = Rounds(mode, ops, is_chain=is_chain)
    random = np.random.default_rng(5)
    generator = torch.Generator().manual_seed(5)
    for row in range(3):
        rounds.enter(row, 1 + row)
    for number in range(14):
        trees, last = {}, {}
        for row in random.permutation(3)[: random.integers(1, 4)].tolist():
            size = int(random.integers(1, 9))
            tree = list(range(-1, size - 1)) if is_chain else tree_of("random", size, generator)
            depths = [0]
            for parent in tree[1:]:
                depths.append(depths[parent] + 1)
            near = [node for node in range(size) if depths[node] < 4]
            trees[row], last[row] = tree, int(random.choice(near))
        depths = {row: len(rounds.history[row]) for row in trees}
        saves = [(row, 10 + row, depth + 1) for row, depth in depths.items()]
        out = rounds.round(trees, last, saves)
        first = 0
        for row, tree in trees.items():
            rounds.check(row, 10 + row, depths[row] + 1)
            expected = rounds.plain(row, len(rounds.history[row]), with_output=True)[3]
            assert torch.allclose(out[first + last[row]], expected, atol=5e-5)
            if mode != "log":
                assert torch.equal(out[first + last[row]], expected)
            first += len(tree)
        if number % 5 == 4:
            leaving = int(random.integers(3))
            rounds.settle(leaving)
            rounds.check(leaving, leaving + 1, len(rounds.history[leaving]))
            rounds.enter(leaving, 2)
    for row in range(3):
        rounds.settle(row)
        rounds.check(row, row + 1, len(rounds.history[row]))
    assert rounds.recurrent[:, [0, *range(4, 10), *range(13, SLOTS)]].isnan().all()


@backends
@pytest.mark.parametrize("mode", ["replay", "log"])
@pytest.mark.parametrize("dropped", range(4))
def test_a_fold_drops_what_is_past_its_depth(ops, mode, dropped):
    rounds = Rounds(mode, ops)
    rounds.enter(0, 5)
    rounds.round({0: RIGHT}, {0: 6})
    rounds.keeper.fold([StateFold(0, 1, 9 - dropped)])
    rounds.check(0, 1, 9 - dropped)
    del rounds.history[0][9 - dropped :]
    rounds.round({0: CHAIN}, {0: 1})
    rounds.settle(0)
    rounds.check(0, 1, 11 - dropped)


@backends
@modes
def test_what_was_pending_of_a_row_is_void_when_a_request_enters(ops, mode):
    rounds = Rounds(mode, ops)
    rounds.enter(0, 5)
    rounds.round({0: RIGHT}, {0: 6})
    rounds.enter(0, 2)
    rounds.round({0: CHAIN}, {0: 2})
    rounds.settle(0)
    rounds.check(0, 1, 5)


@backends
@modes
def test_rows_without_nodes_and_rows_that_nothing_is_taken_of(ops, mode):
    rounds = Rounds(mode, ops)
    for row in range(3):
        rounds.enter(row, 3)
    rounds.round({0: RIGHT, 1: [], 2: CHAIN}, {0: 2, 1: None, 2: None})
    for row, depth in ((0, 5), (1, 3), (2, 3)):
        rounds.settle(row)
        rounds.check(row, row + 1, depth)


@backends
def test_a_log_folds_no_further_than_what_is_committed(ops):
    """R = 9, 4 accepted a round: the third round does not fit; 5 of 8 rows are committed."""
    rounds = Rounds("log", ops)
    rounds.enter(0, 3)
    rounds.round({0: RIGHT}, {0: 6})
    rounds.round({0: RIGHT}, {0: 6}, committed=[3])
    assert (rounds.history[0][2][1] == rounds.hidden[1]).all(), "nothing was folded yet"
    rounds.round({0: RIGHT}, {0: 6}, committed=[8])
    rounds.check(0, 1, 8)
    rounds.keeper.fold([StateFold(0, 1, 13)])
    rounds.check(0, 1, 13)


@backends
def test_a_log_that_is_full_of_uncommitted_rows_is_a_bug_of_the_caller(ops):
    rounds = Rounds("log", ops)
    rounds.enter(0, 3)
    rounds.round({0: RIGHT}, {0: 6})
    rounds.round({0: RIGHT}, {0: 6})
    with pytest.raises(AssertionError, match="not committed"):
        rounds.verify({0: CHAIN}, committed=[4])


@backends
def test_plain_decode_with_a_log_is_trees_of_one_node(ops):
    rounds = Rounds("log", ops, num_nodes=1, max_accepted=1, num_log_rows=4)
    rounds.enter(0, 1)
    for depth in range(1, 12):
        out = rounds.round({0: [-1]}, {0: 0})
        expected = rounds.plain(0, depth + 1, with_output=True)[3]
        assert torch.allclose(out[0], expected, atol=5e-5)
    rounds.settle(0)
    rounds.check(0, 1, 12)


@backends
def test_sliding_windows_refuse_trees(ops):
    rounds = Rounds("snapshot", ops, is_chain=True)
    rounds.enter(0, 3)
    with pytest.raises(ValueError, match="chains"):
        rounds.verify({0: RIGHT})


@backends
@modes
@pytest.mark.parametrize("is_chain", [True, False])
def test_bytes_computed_are_bytes_allocated(ops, mode, is_chain):
    """N = 2, T = 8: through the views that layers get, each storage once."""
    rounds = Rounds(mode, ops, num_requests=2, is_chain=is_chain)
    views = [
        ops.tensor(array)
        for layer in rounds.keeper.layers
        for name in ("conv", "states", "k", "v", "u", "g", "beta")
        for array in [getattr(layer, name)]
        if array is not None
    ]
    expected = spec_bytes(mode, rounds.recurrent_shape, rounds.spec).peak
    assert rounds.keeper.num_bytes == expected
    rows = {"snapshot": 0, "replay": 8, "log": 9 + 8}[mode]
    hidden = 3 * rows * HIDDEN * 4
    starts = {view.untyped_storage().data_ptr(): view for view in views}
    assert physical_bytes(*starts.values()) == expected - hidden

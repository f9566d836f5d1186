"""Recurrent layers of the Triton backend against torch's: all kinds of rows, trees, keeping."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.device_forms import DeviceRoots, DeviceRows, DeviceSingles, DeviceStates
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import window_taps
from hyradix.kernels.tree_recurrence.rules import RULES
from tests.kernels.triton_kernels.ops_cases import (
    LOG,
    WIDTH,
    Both,
    MixerPair,
    int32,
    offsets,
    ragged_trees,
)
from tests.support.interpreter import mend_bfloat16

FAMILIES = ["gdn", "kda", "mamba2"]
TREE = [-1, 0, 0, 1, 1]
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def both(request, device) -> Both:
    if device.type == "cpu":
        mend_bfloat16()
    return Both(device, request.param)


def rows(slots, counts, saves=()) -> RaggedStates:
    """saves: (row, count, slot), sorted."""
    num_saves = np.bincount([s[0] for s in saves], minlength=len(slots)) if saves else 0 * counts
    return RaggedStates(
        offsets(counts), int32(slots), offsets(num_saves), int32([s[1] for s in saves]),
        int32([s[2] for s in saves]),
    )  # fmt: skip


@families
def test_rows_of_one_and_of_several_tokens_in_any_order(both, family):
    pair = MixerPair(both, family, [1, 3, 4, 6])
    counts = int32([1, 5, 1, 2])
    batch = rows([4, 1, 6, 3], counts, [(0, 1, 2), (1, 3, 5), (1, 5, 7), (2, 1, 8)])
    twin, ours = pair.mix(pair.tokens(9), batch)
    both.check(ours, twin)
    assert ours.dtype == both.dtype
    pair.check_pools()


@families
def test_the_device_s_own_forms(both, family):
    pair = MixerPair(both, family, [1, 2, 3])
    batch = rows([2, 1, 3], int32([4, 1, 1]))
    prefill = DeviceStates.of(rows([2], int32([4])), both.device)
    singles = DeviceSingles(4, torch.tensor([1, 3], dtype=torch.int32, device=both.device))
    given = pair.tokens(6)
    twin, ours = pair.mix(given, batch, DeviceRows(prefill, singles))
    both.check(ours, twin)
    twin, ours = pair.mix(
        [[x[4:] for x in side] for side in given],
        rows([1, 3], int32([1, 1])),
        DeviceRows(None, DeviceSingles(0, singles.slots)),
    )
    both.check(ours, twin)
    pair.check_pools()


@families
@pytest.mark.parametrize("mode", ["log", "snapshot", "replay"])
def test_trees_behind_other_rows(both, family, mode):
    pair, counts = MixerPair(both, family, [2, 5]), int32([2, 0])
    given, specs = pair.tokens(2 + 6), pair.spec(mode, counts, 5)
    trees = ragged_trees([TREE, [-1]], [5, 2], counts, specs[0], 2)
    outs = both.pair(torch.full((8, pair.layer.hv * pair.layer.dv), float("nan")))
    for side, ops in enumerate((both.twin, both.ours)):
        pair.layer.mix_trees(
            ops, given[side], pair.weights[side], trees, pair.conv[side], pair.state[side],
            specs[side], outs[side],
        )  # fmt: skip
    both.check(outs[1][2:], outs[0][2:])
    assert outs[1][:2].isnan().all()
    for name in ("conv", "states", "k", "v", "u", "g", "beta"):
        twin, ours = (getattr(spec, name) for spec in specs)
        if twin is not None:
            assert torch.equal(twin.isnan(), ours.isnan().cpu())
            both.check(ours.nan_to_num(), twin.nan_to_num())
    pair.check_pools()


@families
@pytest.mark.parametrize("on_device", [False, True])
def test_roots_append_to_the_log_themselves(both, family, on_device):
    pair, counts = MixerPair(both, family, [2, 5]), int32([2, 0])
    given, specs = pair.tokens(3), pair.spec("log", counts, 1)
    trees = ragged_trees([[-1], [-1]], [5, 2], counts, specs[0], 1)
    outs = both.pair(torch.full((3, pair.layer.hv * pair.layer.dv), float("nan")))
    forms = trees
    if on_device:
        numbers = (trees.slots, trees.rows, trees.num_log_rows)
        forms = DeviceRoots(1, *(torch.from_numpy(x).to(both.device) for x in numbers))
    for side, ops in enumerate((both.twin, both.ours)):
        pair.layer.mix_trees(
            ops, given[side], pair.weights[side], (trees, forms)[side], pair.conv[side],
            pair.state[side], specs[side], outs[side],
        )  # fmt: skip
    both.check(outs[1][1:], outs[0][1:])
    assert both.ours.appends_roots
    for row, count in zip([1, 2], counts.tolist(), strict=True):
        for name, shift in (("k", 0), ("u", 0), ("g", 0), ("conv", WIDTH - 1)):
            twin, ours = (getattr(spec, name) for spec in specs)
            both.check(ours[row, shift + count], twin[row, shift + LOG])
    pair.check_pools()


@families
def test_logs_are_folded_and_node_states_copied(both, family):
    pair, counts = MixerPair(both, family, [2, 5]), int32([3, 2])
    rule = next(rule for rule in RULES if rule.name == family)
    logs, nodes = pair.spec("log", counts, 1), pair.spec("snapshot", counts, 2)
    taps = window_taps(counts, width=WIDTH, first_row=WIDTH - 1)
    moves = Moves(int32([5, 2]), int32([5, 7]), int32([1, 2]), counts, taps)
    one = Moves(int32([2]), int32([8]), int32([2]), int32([1]), taps[1:] * 0 - 1)
    for side, ops in enumerate((both.twin, both.ours)):
        pools = (pair.state[side].unsqueeze(0), pair.conv[side].unsqueeze(0))
        log, copied = logs[side], nodes[side]
        arrays = StateArrays(*pools, *(x.unsqueeze(0) for x in (log.conv,)), k=log.k.unsqueeze(0),
                             u=log.u.unsqueeze(0), g=log.g.unsqueeze(0))  # fmt: skip
        ops.fold(rule, arrays, moves)
        copied.states.nan_to_num_(0.5)
        arrays = StateArrays(*pools, copied.conv.unsqueeze(0), states=copied.states.unsqueeze(0))
        ops.copy_nodes(arrays, one)
    pair.check_pools()


@families
def test_held_inputs_are_replayed_and_rows_move(both, family):
    pair, counts = MixerPair(both, family, [2, 5]), int32([2, 1])
    rule = next(rule for rule in RULES if rule.name == family)
    held = pair.spec("replay", counts, 3)
    taps = window_taps(counts, width=WIDTH, first_row=WIDTH - 1)
    moves = Moves(int32([5, 2]), int32([5, 7]), int32([1, 2]), counts, taps)
    for side, ops in enumerate((both.twin, both.ours)):
        spec = held[side]
        spec.beta.fill_(0.5)
        rest = {name: getattr(spec, name).unsqueeze(0) for name in ("k", "v", "g", "beta")}
        arrays = StateArrays(
            pair.state[side].unsqueeze(0), pair.conv[side].unsqueeze(0), spec.conv.unsqueeze(0),
            **rest,
        )  # fmt: skip
        ops.replay(rule, arrays, moves)
        ops.move_rows(rest["v"], int32([1, 1, 2]), int32([1, 2, 2]), int32([0, 1, 0]))
    pair.check_pools()
    assert torch.equal(held[0].v.nan_to_num(7), held[1].v.cpu().nan_to_num(7))

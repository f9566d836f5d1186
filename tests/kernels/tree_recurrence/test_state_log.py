"""Acceptance: rows appended and folded, inputs replayed, track boundaries (W7, C5)."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.causal_conv.tree import windows_after_rows
from hyradix.kernels.tree_recurrence import masked, sequential
from hyradix.kernels.tree_recurrence.rules import RULES, Rows
from hyradix.kernels.tree_recurrence.state_log import append_, drop_first_, fold_, folded
from hyradix.kernels.tree_recurrence.topology import chain_parents, paths
from tests.kernels.tree_recurrence.cases import NAN, error, make_case, parts, same

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
seeds = pytest.mark.parametrize("seed", range(4))
FLOAT64 = torch.float64


def with_room(log, num_rows):
    """The same log with ``num_rows`` more rows of NaN."""
    return Rows(
        *(
            torch.cat([x, torch.full_like(x[:, :1], NAN).expand(-1, num_rows, *x.shape[2:])], 1)
            for x in parts(log)
        )
    )


def verify(case, base=None, log=None, num_log_rows=None):
    return masked.verify(
        case.rule,
        case.base if base is None else base,
        case.log if log is None else log,
        case.num_log_rows if num_log_rows is None else num_log_rows,
        case.q,
        case.inputs,
        case.tree,
    )


@rules
@seeds
@pytest.mark.parametrize(("dtype", "limit"), [(FLOAT64, 1e-12), (torch.float32, 1e-5)])
def test_folding_a_path_is_the_sequential_state_of_its_node(rule, seed, dtype, limit):
    case = make_case(rule, seed).to(dtype)
    _, rows = verify(case)
    for node in range(max(map(case.size, range(3)))):
        last = torch.tensor([min(node, case.size(n) - 1) for n in range(3)])
        index, counts = paths(case.tree, last)
        log = with_room(case.log, index.shape[1])
        total = append_(log, case.num_log_rows, rows.take(index), counts)
        assert torch.equal(total, case.num_log_rows + counts)
        states = folded(case.base, log, total)
        for n in range(3):
            assert error(states[n], case.oracle(n)[1][last[n]]) <= limit


@rules
@seeds
def test_a_fold_at_any_position_then_the_rest_of_the_log(rule, seed):
    """log + tree = fold + tree, wherever the fold is; rows move to the front, windows with them."""
    case = make_case(rule, seed).to(FLOAT64)
    o, rows = verify(case)
    columns = torch.randn(3, 4, 3 + 8)  # K = 4, no nodes
    for position in range(9):
        counts = case.num_log_rows.clamp(max=position)
        base = folded(case.base, case.log, counts)
        log = Rows(*(x.clone() for x in parts(case.log)))
        moved = columns.clone()
        for x in parts(log):
            drop_first_(x, counts)
        drop_first_(moved, counts, dim=2)
        o2, rows2 = verify(case, base, log, case.num_log_rows - counts)
        assert torch.equal(moved[:, :, :3], windows_after_rows(columns, counts, width=4))
        for n in range(3):
            size, left = case.size(n), int((case.num_log_rows - counts)[n])
            assert error(o2[n, :size], o[n, :size]) <= 1e-12
            assert error(rows2.u[n, :size], rows.u[n, :size]) <= 1e-12
            assert torch.equal(log.u[n, :left], case.log.u[n, counts[n] :][:left])
            assert torch.equal(moved[n, :, 3 : 3 + left], columns[n, :, 3 + counts[n] :][:, :left])


@rules
def test_a_fold_in_place_or_into_another_slot_touches_nothing_else(rule):
    case = make_case(rule, 3).to(FLOAT64)
    pool = torch.full((9, *case.base.shape[1:]), NAN, dtype=FLOAT64)
    slots, tracks = torch.tensor([4, 1, 7]), torch.tensor([2, 5, 8])
    pool[slots] = case.base
    counts = torch.minimum(case.num_log_rows, torch.tensor([0, 2, 5]))
    fold_(pool, slots, tracks, case.log, counts)
    assert torch.equal(pool[slots], case.base)
    fold_(pool, slots, slots, case.log, case.num_log_rows)
    assert torch.equal(pool[tracks], folded(case.base, case.log, counts))
    assert torch.equal(pool[slots], folded(case.base, case.log, case.num_log_rows))
    assert pool[[0, 3, 6]].isnan().all()
    assert torch.equal(folded(case.base, case.log, torch.zeros(3, dtype=torch.long)), case.base)


@rules
def test_a_log_that_is_too_short_is_refused_whole(rule):
    case = make_case(rule, 1)
    _, rows = verify(case)
    before = [x.clone() for x in parts(case.log)]
    with pytest.raises(ValueError, match="a log of 8 rows cannot hold 9"):
        append_(case.log, torch.tensor([0, 8, 0]), rows, torch.ones(3, dtype=torch.long))
    assert all(map(same, parts(case.log), before))


@rules
@seeds
@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32])
def test_replay_of_a_path_ends_in_the_bits_of_its_node(rule, seed, dtype):
    case = make_case(rule, seed, max_rows=0).to(dtype)
    n, t = case.q.shape[:2]
    buffer = torch.empty(n, t, *case.base.shape[1:], dtype=dtype)
    sequential.verify(
        rule, case.base, case.log, case.num_log_rows, case.q, case.inputs, case.tree, buffer
    )
    for node in range(t):
        last = torch.tensor([min(node, case.size(i) - 1) for i in range(n)])
        index, counts = paths(case.tree, last)
        held = case.inputs.take(index)
        pool = torch.full((8, *case.base.shape[1:]), NAN, dtype=dtype)
        slots = torch.tensor([6, 1, 3])
        pool[slots] = case.base
        sequential.replay_(rule, pool, slots, held, counts)
        assert torch.equal(pool[slots], buffer[torch.arange(n), last])
        assert pool[[0, 2, 4, 5, 7]].isnan().all()


def both_ways(case, accepted, boundary):
    """(working state, track) by fold and by replay; the track is due after ``boundary`` nodes."""
    _, rows = verify(case)
    index, counts = paths(case.tree, torch.tensor([accepted]))
    one, track = torch.tensor([1]), torch.tensor([2])
    by_fold, by_replay = (
        torch.full((3, *case.base.shape[1:]), NAN, dtype=FLOAT64) for _ in range(2)
    )
    by_fold[1] = by_replay[1] = case.base[0]

    log = with_room(case.log, index.shape[1])
    total = append_(log, case.num_log_rows, rows.take(index), counts)
    fold_(by_fold, one, track, log, case.num_log_rows + boundary)
    fold_(by_fold, one, one, log, total)

    held = case.inputs.take(index)
    by_replay[1] = sequential.after_log(case.base, case.log, case.num_log_rows)[0]
    sequential.replay_(
        case.rule,
        by_replay,
        one,
        held,
        counts,
        save_counts=torch.tensor([boundary]),
        save_slots=track,
    )
    return by_fold[1:], by_replay[1:]


@rules
def test_w7_three_nodes_consumed_and_the_boundary_at_the_second(rule):
    """W7: working state at +3, track at exactly 256, both equal sequential decode."""
    case = make_case(rule, 7, parents=[chain_parents(4)]).to(FLOAT64)
    first_position = 254  # consumed before this round: the second node reaches 256
    _, states, _ = case.oracle(0)
    for working, track in both_ways(case, 2, 256 - first_position):
        assert error(working, states[2]) <= 1e-12
        assert error(track, states[1]) <= 1e-12


@rules
@pytest.mark.parametrize("accepted", range(5))
def test_c5_a_boundary_at_each_offset_of_an_accepted_run(rule, accepted):
    """C5, on a tree whose accepted path is never the first child (C23)."""
    parents = [-1, 0, 0, 2, 2, 4, 4, 6, 6]
    right = [0, 2, 4, 6, 8]
    case = make_case(rule, accepted, parents=[parents]).to(FLOAT64)
    _, states, _ = case.oracle(0)
    for boundary in range(1, accepted + 2):
        for working, track in both_ways(case, right[accepted], boundary):
            assert error(working, states[right[accepted]]) <= 1e-12
            assert error(track, states[right[boundary - 1]]) <= 1e-12


@rules
def test_a_thousand_tokens_by_rounds_drift_less_than_1e_5(rule):
    """Float32 rounds (verify, append, fold) against one float64 run."""
    case = make_case(rule, 9, parents=[chain_parents(1000)], max_rows=0, dims=(16, 8))
    state, o = case.base, []
    for first in range(0, 1000, 4):
        piece = make_case(rule, 0, parents=[chain_parents(4)], max_rows=0)
        index = torch.arange(first, first + 4).unsqueeze(0)
        out, rows = masked.verify(
            rule,
            state,
            case.log,
            case.num_log_rows,
            case.q[:, first : first + 4],
            case.inputs.take(index),
            piece.tree,
        )
        o.append(out[0])
        state = folded(state, rows, torch.tensor([4]))
    expected_o, states, _ = case.oracle(0)
    assert error(torch.cat(o), expected_o) <= 1e-5
    assert error(state[0], states[-1]) <= 1e-5

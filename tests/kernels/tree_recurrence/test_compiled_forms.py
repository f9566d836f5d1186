"""The compiled recurrence over trees, every rule: against the oracle, and replay against verify."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.layer_compiled import hold_inputs, walk
from hyradix.kernels.tree_recurrence.log_compiled import solve
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.kernels.tree_recurrence.rules import KDA, RULES
from tests.kernels.tree_recurrence.cases import NAN, TOPOLOGIES, error, make_case, parts, tree_of

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
DIMS = [(8, 5), (33, 20), (16, 48), (7, 150)]
BACKENDS = [CompiledOps(), TorchOps()]


def nodes_of(case, request, group):
    """One group's nodes as the kernels take them."""
    n, ratio = case.size(request), case.base.shape[1] // case.q.shape[2]
    heads = slice(group * ratio, (group + 1) * ratio)
    k, v, g, beta = (x[request, :n] for x in parts(case.inputs))
    mixed = torch.cat([case.q[request, :n, group], k[:, group], v[:, heads].flatten(1)], 1)
    flat = [x.contiguous().numpy().reshape(-1) for x in (mixed, g[:, heads], beta[:, heads])]
    return n, ratio, mixed.shape[1], flat


def flat_tree(case, request):
    parents = np.array(case.parents[request][: case.size(request)], np.int32)
    return FlatTrees.of(np.array([0, len(parents)], np.int32), parents)


def by_solving(case, request):
    """o and the rows' u of one request; its log and rows are in row 2 of the buffers."""
    capacity, num_rows = case.log.u.shape[1], int(case.num_log_rows[request])
    t = case.q.shape[1]
    logs = [torch.full((3, capacity + t, *x.shape[2:]), NAN).numpy() for x in parts(case.log)]
    for buffer, x in zip(logs, parts(case.log), strict=True):
        buffer[2, :num_rows] = x[request, :num_rows].numpy()
    state = torch.full((4, *case.base.shape[1:]), NAN)
    state[3] = case.base[request]
    tree, dv = flat_tree(case, request), case.base.shape[3]
    outputs = []
    for group in range(case.q.shape[2]):
        n, ratio, stride, flat = nodes_of(case, request, group)
        o = np.full(n * ratio * dv, NAN, np.float32)
        solve(
            tree.parents, tree.path_offsets, tree.path_nodes, 0, n, state.numpy(), 3, 2, num_rows,
            capacity, group, ratio, flat[0], stride, *flat[1:], *logs, case.rule.has_delta, o,
        )  # fmt: skip
        outputs.append(torch.from_numpy(o.reshape(n, ratio, dv)))
    assert torch.equal(state[3], case.base[request])
    assert all(np.isnan(buffer[:2]).all() for buffer in logs)
    rows = [torch.from_numpy(buffer[2, capacity : capacity + n]) for buffer in logs]
    return torch.cat(outputs, 1), rows


def by_walking(case, request):
    """o, node states and held inputs, in row 1 of the buffers."""
    n, t = case.size(request), case.q.shape[1]
    states = torch.full((2, t, *case.base.shape[1:]), NAN)
    held = [torch.full((2, t, *x.shape[2:]), NAN).numpy() for x in parts(case.inputs)]
    state = torch.full((4, *case.base.shape[1:]), NAN)
    state[3] = case.base[request]
    tree, (dk, dv) = flat_tree(case, request), case.base.shape[2:]
    outputs = []
    for group in range(case.q.shape[2]):
        n, ratio, stride, flat = nodes_of(case, request, group)
        o = np.full(n * ratio * dv, NAN, np.float32)
        walk(
            tree.parents, 0, n, state.numpy(), 3, states.numpy(), 1, group, ratio, flat[0], stride,
            *flat[1:], case.rule.has_delta, case.rule.has_channel_decay, o,
        )  # fmt: skip
        hold_inputs(n, 1, group, ratio, dk, dv, flat[0], stride, *flat[1:], *held)
        outputs.append(torch.from_numpy(o.reshape(n, ratio, dv)))
    assert torch.equal(state[3], case.base[request])
    assert states[0].isnan().all()
    return torch.cat(outputs, 1), states[1, :n], held


@rules
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dims", DIMS)
def test_random_trees_with_and_without_log_rows(rule, seed, dims):
    case = make_case(rule, seed, dims=dims, heads=(2, 4) if seed % 2 else (3, 3))
    without = make_case(rule, seed, dims=dims, max_rows=0)
    for request in range(3):
        o, rows = by_solving(case, request)
        expected_o, _, expected = case.oracle(request)
        assert error(o, expected_o) <= 1e-5
        assert error(rows[1], expected.u) <= 1e-5
        o, states, _ = by_walking(without, request)
        expected_o, expected_states, _ = without.oracle(request)
        assert error(o, expected_o) <= 1e-5
        assert error(states, expected_states) <= 1e-5


@rules
@pytest.mark.parametrize("kind", TOPOLOGIES)
@pytest.mark.parametrize(("decay", "keys"), [("strong", "random"), ("none", "repeated")])
def test_63_nodes_of_every_topology_on_hard_inputs(rule, kind, decay, keys):
    parents = [tree_of(kind, 63, torch.Generator().manual_seed(63))]
    case = make_case(rule, 7, parents=parents, max_rows=16, decay=decay, keys=keys)
    o, rows = by_solving(case, 0)
    expected_o, _, expected = case.oracle(0)
    assert error(o, expected_o) <= 1e-5
    assert error(rows[1], expected.u) <= 1e-5


@rules
@pytest.mark.parametrize("value", [3.0, 1e30, NAN])
def test_w6_nobody_but_descendants_sees_a_node(rule, value):
    parents = [[-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]]
    case, other = (make_case(rule, 6, parents=parents, max_rows=r) for r in (4, 4))
    walked, changed = (make_case(rule, 6, parents=parents, max_rows=0) for _ in range(2))
    for x in (other, changed):
        x.inputs.v[0, 3] *= value
        x.inputs.k[0, 3] *= 0.5
    others = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    for run, ours, theirs in ((by_solving, case, other), (by_walking, walked, changed)):
        o, o2 = run(ours, 0)[0], run(theirs, 0)[0]
        assert torch.equal(o[others], o2[others])
        assert not torch.equal(o[3], o2[3])


def arrays_for(case, layers, **buffers):
    """A pool of ``layers`` layers whose slot 3 is request 0's base, and one column of channels."""
    recurrent = torch.full((layers, 6, *case.base.shape[1:]), NAN)
    recurrent[:, 3] = case.base[0]
    windows = torch.full((layers, 6, 3, 7), NAN)
    windows[:, 3] = torch.arange(21.0).reshape(3, 7)
    conv = torch.arange(layers * 2 * 40 * 7.0).reshape(layers, 2, 40, 7) + 100
    return StateArrays(recurrent=recurrent, windows=windows, conv=conv, **buffers)


def move(ops, method, rule, arrays, *, source, target, count):
    taps = np.array([[-2, -3, 5]], np.int32)
    one = np.array([1], np.int32)
    moves = Moves(one * source, one * target, one, one * count, taps)
    views = StateArrays(
        **{
            name: None if x is None else ops.view(x)
            for name in StateArrays.__slots__
            for x in [getattr(arrays, name)]
        }
    )
    method(ops)(rule, views, moves)


@rules
@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dims", DIMS)
def test_replay_ends_in_the_state_of_the_node(rule, ops, dims):
    """Bit by bit what the compiled verify left; in another slot, then in place."""
    case = make_case(rule, 2, parents=[list(range(-1, 9))], max_rows=0, dims=dims)
    _, states, held = by_walking(case, 0)
    held = [torch.from_numpy(x).unsqueeze(0).repeat(3, *[1] * x.ndim) for x in held]
    names = dict(zip(("k", "v", "g", "beta"), held, strict=True))
    arrays = arrays_for(case, 3, **names)
    for target, count in ((4, 3), (3, 10)):
        move(ops, lambda ops: ops.replay, rule, arrays, source=3, target=target, count=count)
        if ops.name == "compiled":
            assert all(torch.equal(x, states[count - 1]) for x in arrays.recurrent[:, target])
        assert error(arrays.recurrent[2, target], case.oracle(0)[1][count - 1]) <= 1e-5
        expected = torch.stack([torch.arange(7.0, 14), torch.arange(14.0, 21)])
        assert torch.equal(arrays.windows[1, target, :2], expected)
        assert torch.equal(arrays.windows[1, target, 2], arrays.conv[1, 1, 5])
    assert arrays.recurrent[:, [0, 1, 2, 5]].isnan().all()
    assert arrays.windows[:, [0, 1, 2, 5]].isnan().all()


@rules
@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dims", DIMS)
def test_a_fold_of_a_path_is_its_sequential_state(rule, ops, dims):
    case = make_case(rule, 3, parents=[list(range(-1, 12))], max_rows=0, dims=dims)
    _, rows = by_solving(case, 0)
    buffers = [torch.full((3, 2, 20, *x.shape[1:]), NAN) for x in rows]
    for buffer, x in zip(buffers, rows, strict=True):
        buffer[:, 1, : len(x)] = x
    arrays = arrays_for(case, 3, **dict(zip(("k", "u", "g"), buffers, strict=True)))
    for target, count in ((4, 1), (5, 7), (3, 13)):
        move(ops, lambda ops: ops.fold, rule, arrays, source=3, target=target, count=count)
        expected = case.oracle(0)[1][count - 1]
        assert all(error(x, expected) <= 1e-5 for x in arrays.recurrent[:, target])
    assert arrays.recurrent[:, :3].isnan().all()


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
def test_rows_move_one_after_the_other(ops):
    array = torch.arange(2 * 3 * 6 * 5.0).reshape(2, 3, 6, 5, 1)
    expected = array.clone()
    expected[:, 1, 0], expected[:, 1, 1], expected[:, 2, 4] = (
        array[:, 1, 2], array[:, 1, 4], array[:, 2, 5],
    )  # fmt: skip
    numbers = (np.array(x, np.int32) for x in ([1, 1, 2], [2, 4, 5], [0, 1, 4]))
    ops.move_rows(ops.view(array), *numbers)
    assert torch.equal(array, expected)


def test_unbounded_channel_decay_stays_finite():
    """KDA's gates: e^G alone is 0, e^-G alone overflows; ratios are neither."""
    case = make_case(KDA, 4, parents=[list(range(-1, 20))], max_rows=16)
    case.inputs.g.mul_(40)
    case.log.g.mul_(40)
    o, rows = by_solving(case, 0)
    expected_o, _, expected = case.oracle(0)
    assert error(o, expected_o) <= 1e-5
    assert error(rows[1], expected.u) <= 1e-5

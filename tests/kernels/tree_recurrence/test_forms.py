"""The sequential and the masked form against the oracle, over trees, rules and bad inputs."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.tree_recurrence import masked, sequential
from hyradix.kernels.tree_recurrence.chunked import naive as along_a_sequence
from hyradix.kernels.tree_recurrence.naive import naive
from hyradix.kernels.tree_recurrence.rules import GDN, RULES, Inputs, Rows
from hyradix.kernels.tree_recurrence.topology import PAD, chain_parents
from tests.kernels.tree_recurrence.cases import (
    NAN,
    TOPOLOGIES,
    error,
    make_case,
    parts,
    same,
    tree_of,
)

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=["float64", "float32"])
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def run(form, case):
    """o, rows and, in the sequential form, the buffer."""
    arguments = (case.rule, case.base, case.log, case.num_log_rows, case.q, case.inputs, case.tree)
    if form == "masked":
        return (*masked.verify(*arguments), None)
    n, t = case.q.shape[:2]
    buffer = torch.full((n + 1, t + 2, *case.base.shape[1:]), NAN, dtype=case.base.dtype)
    return (*sequential.verify(*arguments, buffer), buffer)


def largest_error(form, case):
    """Over o, u and (where there are any) node states of all requests; padding must be zero."""
    before = [x.clone() for x in (case.base, *parts(case.log), case.q, *parts(case.inputs))]
    o, rows, buffer = run(form, case)
    after = (case.base, *parts(case.log), case.q, *parts(case.inputs))
    assert all(map(same, before, after))
    errors = []
    for request in range(len(case.parents)):
        size = case.size(request)
        expected_o, states, expected = case.oracle(request)
        errors += [error(o[request, :size], expected_o), error(rows.u[request, :size], expected.u)]
        if buffer is not None:
            errors.append(error(buffer[request, :size], states))
        assert all(not x[request, size:].any() for x in (o, *parts(rows)))
    return max(errors)


forms = pytest.mark.parametrize("form", ["sequential", "masked"])


@forms
@rules
@dtypes
@pytest.mark.parametrize("seed", range(6))
def test_random_padded_batches(form, rule, dtype, seed, record_property):
    worst = largest_error(form, make_case(rule, seed).to(dtype))
    record_property("error", worst)
    assert worst <= LIMITS[dtype]


@forms
@rules
@dtypes
@pytest.mark.parametrize("kind", TOPOLOGIES)
@pytest.mark.parametrize("num_nodes", [2, 21, 64])
def test_every_topology_with_a_full_log(form, rule, dtype, kind, num_nodes, record_property):
    parents = [tree_of(kind, num_nodes, torch.Generator().manual_seed(num_nodes))]
    case = make_case(rule, num_nodes, parents=parents, max_rows=16, heads=(1, 3), dims=(16, 8))
    worst = largest_error(form, case.to(dtype))
    record_property("error", worst)
    assert worst <= LIMITS[dtype]


@forms
@rules
@dtypes
@pytest.mark.parametrize("decay", ["strong", "none"])
@pytest.mark.parametrize("keys", ["random", "repeated"])
@pytest.mark.parametrize("num_nodes", [5, 63])
def test_hard_inputs(form, rule, dtype, decay, keys, num_nodes, record_property):
    generator = torch.Generator().manual_seed(1)
    parents = [chain_parents(num_nodes), tree_of("random", num_nodes, generator)]
    case = make_case(rule, 5, parents=parents, max_rows=16, decay=decay, keys=keys)
    worst = largest_error(form, case.to(dtype))
    record_property("error", worst)
    assert worst <= LIMITS[dtype]


@forms
@rules
def test_a_log_without_room_for_rows(form, rule):
    assert largest_error(form, make_case(rule, 3, max_rows=0).to(torch.float64)) <= 1e-12


@forms
@rules
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("value", [3.0, 1e30])
def test_nobody_but_descendants_sees_a_node(form, rule, seed, value):
    """C23. Other requests and all nodes that do not descend from it keep every bit."""
    case = make_case(rule, seed, max_nodes=14)
    o, rows, _ = run(form, case)
    ancestors = case.tree.ancestors
    for node in range(case.size(0)):
        other = case.to(torch.float32)
        changed = [x.clone() for x in (case.q, *parts(case.inputs))]
        for x, factor in zip(changed, (1, 1, value, 0.5, 1), strict=True):
            x[0, node] *= factor
        changed[0][0, node] += 1
        object.__setattr__(other, "q", changed[0])
        object.__setattr__(other, "inputs", Inputs(*changed[1:]))
        o2, rows2, _ = run(form, other)
        blind = ~ancestors[:, :, node]
        blind[1:] = True
        assert torch.equal(o[blind], o2[blind])
        assert torch.equal(rows.u[blind], rows2.u[blind])
        assert not torch.equal(o[0, node], o2[0, node])


@rules
def test_the_sequential_form_keeps_even_nan_to_its_descendants(rule):
    case = make_case(rule, 1, parents=[[-1, 0, 0, 1, 2]])
    o, _, _ = run("sequential", case)
    case.inputs.v[0, 1] = NAN
    o2, _, _ = run("sequential", case)
    assert torch.equal(o[0, [0, 2, 4]], o2[0, [0, 2, 4]])


@rules
def test_padding_and_neighbours_change_no_node(rule):
    case = make_case(rule, 2)
    whole = run("masked", case)[0]
    for request, row in enumerate(case.parents):
        size = case.size(request)
        one = slice(request, request + 1)
        o, _ = masked.verify(
            rule,
            case.base[one],
            Rows(*(x[one] for x in parts(case.log))),
            case.num_log_rows[one],
            case.q[one, :size],
            Inputs(*(x[one, :size] for x in parts(case.inputs))),
            make_case(rule, 0, parents=[row[:size]]).tree,
        )
        assert error(whole[request, :size], o[0].double()) < 1e-6


@rules
def test_w6_ten_nodes_in_three_groups(rule):
    """W6: nodes 4-6 continue node 1, 7-9 node 2; perturbing node 3 changes nobody."""
    parents = [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    case = make_case(rule, 6, parents=[parents]).to(torch.float64)
    for form in ("sequential", "masked"):
        o, rows, _ = run(form, case)
        for node, path in {
            4: [0, 1, 4],
            5: [0, 1, 5],
            6: [0, 1, 6],
            7: [0, 2, 7],
            9: [0, 2, 9],
        }.items():
            chain_o, _, chain_rows = case.oracle(0, path=path)
            assert error(o[0, node], chain_o[-1]) <= 1e-12
            assert error(rows.u[0, node], chain_rows.u[-1]) <= 1e-12
        perturbed = make_case(rule, 6, parents=[parents]).to(torch.float64)
        for x in parts(perturbed.inputs):
            x[0, 3] *= 0.25
        o2, _, _ = run(form, perturbed)
        others = [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert torch.equal(o[0, others], o2[0, others])
        assert not torch.equal(o[0, 3], o2[0, 3])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_chain_is_the_recurrence_along_a_sequence(rule):
    case = make_case(rule, 1, parents=[chain_parents(20)]).to(torch.float64)
    inputs = Inputs(*(x[0] for x in parts(case.inputs)))
    no_rows = Rows(inputs.k[:0], inputs.v[:0], inputs.g[:0])
    o, states, _ = naive(rule, case.base[0], no_rows, case.q[0], inputs, chain_parents(20))
    expected_o, expected = along_a_sequence(rule, case.q[0], inputs, case.base[0])
    assert error(o, expected_o) <= 1e-14
    assert error(states, expected) <= 1e-14


def test_the_oracle_refuses_what_is_no_tree():
    case = make_case(GDN, 1, parents=[chain_parents(3)])
    with pytest.raises(ValueError, match="a parent precedes its child"):
        naive(GDN, case.base[0], case.log, case.q[0], case.inputs, [-1, 2, 1])
    with pytest.raises(ValueError, match="no padding"):
        naive(GDN, case.base[0], case.log, case.q[0], case.inputs, [-1, 0, PAD])

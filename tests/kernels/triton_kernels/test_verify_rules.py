"""The masked form of all three recurrences on the GPU against the node-by-node oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees
from hyradix.kernels.tree_recurrence.rules import RULES, Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.topology import PAD
from hyradix.kernels.tree_recurrence.triton_channels import ChannelScratch
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch, verify_nodes_
from hyradix.kernels.triton_table import VerifyConfig
from tests.kernels.tree_recurrence.cases import Case, error, make_case, parts
from tests.kernels.triton_kernels.cases import NAN

ROWS = [2, 3, 1]


def spec_of(case: Case) -> SpecLayer:
    """Log rows, then the nodes' k, v and g; NaN elsewhere."""
    n, capacity, nodes = len(case.parents), case.log.u.shape[1], case.q.shape[1]
    arrays = []
    for logged, own in zip(parts(case.log), parts(case.inputs)[:3], strict=True):
        array = torch.full((n + 1, capacity + nodes, *own.shape[2:]), NAN)
        array[ROWS] = torch.cat([logged, own], 1)
        arrays.append(array)
    k, u, g = arrays
    return SpecLayer(mode="log", conv=None, first_node=0, num_log_rows=capacity, k=k, u=u, g=g)


def trees_of(case: Case, device: torch.device) -> DeviceTrees:
    """All trees behind one another."""
    sizes = [case.size(i) for i in range(len(case.parents))]
    cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    parents = [[p for p in row if p != PAD] for row in case.parents]
    flat = FlatTrees.of(cu, np.concatenate(parents).astype(np.int32))
    slots, rows = (np.array(x, np.int32) for x in ([4, 1, 2], ROWS))
    taps = np.zeros((int(cu[-1]), 2), np.int32)
    numbers = case.num_log_rows.int().numpy()
    trees = RaggedTrees(flat, cu[:-1], slots, rows, numbers, taps)
    return DeviceTrees.of(trees, case.q.shape[1], device, padded_to=len(sizes) + 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(2))
def test_nodes_equal_the_oracle(device, rule: Rule, seed: int):
    case = make_case(rule, seed, max_nodes=18, max_rows=4, dims=(20, 7))
    trees, spec = trees_of(case, device), spec_of(case)
    count, capacity, nodes = 3, case.log.u.shape[1], case.q.shape[1]
    (hk, hv), total = (case.q.shape[2], case.base.shape[1]), sum(map(case.size, range(count)))
    scratch = TreeScratch(total, hk, hv, 20, 7, device)
    scratch.o.fill_(NAN)
    real = [(n, slice(0, case.size(n))) for n in range(count)]
    scratch.q.copy_(torch.cat([case.q[n, own] for n, own in real]))
    scratch.beta.copy_(torch.cat([case.inputs.beta[n, own] for n, own in real]))
    state = torch.full((5, hv, 20, 7), NAN, device=device)
    state[[4, 1, 2]] = case.base.to(device)
    channels = None
    if rule.has_channel_decay:
        channels = ChannelScratch(count + 1, nodes, capacity, hv, 20, device)
        for x in (channels.positions, channels.k, channels.q):
            x.fill_(NAN)
        channels.k_products.fill_(NAN)
        channels.q_products.fill_(NAN)
    k, u, g = (x.to(device) for x in (spec.k, spec.u.clone(), spec.g))
    ours = SpecLayer(mode="log", conv=None, first_node=0, num_log_rows=capacity, k=k, u=u, g=g)
    config = VerifyConfig(16, 4, 16)
    verify_nodes_(
        rule, trees, state, ours, scratch, torch.float32, channels=channels, config=config
    )

    start = 0
    for n in range(count):
        size, row = case.size(n), ROWS[n]
        o, _, rows = case.oracle(n)
        assert error(scratch.o[start : start + size].cpu(), o) < 1e-5
        assert error(ours.u[row, capacity : capacity + size].cpu(), rows.u) < 1e-5
        rest = torch.cat([ours.u[row, :capacity], ours.u[row, capacity + size :]]).cpu()
        before = torch.cat([spec.u[row, :capacity], spec.u[row, capacity + size :]])
        assert torch.equal(rest.nan_to_num(7), before.nan_to_num(7))
        start += size
    assert ours.u[0].isnan().all()

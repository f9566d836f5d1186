"""Draft trees through the masked form on the GPU against the torch mixer over trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.gated_delta_net.tree_reference import mix_trees
from hyradix.kernels.gated_delta_net.triton_tree import mix_trees_
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch
from tests.kernels.triton_kernels.cases import NAN, MixerCase, MixerShape, error, log_to, wide

PARENTS = [[-1, 0, 0, 1, 2, 4, 4], [-1], [-1, 0, 1, 2]]


def trees_of(case: MixerCase, counts: torch.Tensor, log: SpecLayer) -> RaggedTrees:
    """Three trees after one token of somebody else."""
    sizes = [len(parents) for parents in PARENTS]
    cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    flat = FlatTrees.of(cu, np.concatenate(PARENTS).astype(np.int32))
    numbers = counts.int().numpy()
    width = case.shape.width
    taps = taps_of(flat, numbers, width=width, first_node=log.first_node, first_row=width - 1)
    return RaggedTrees(
        flat, cu[:-1] + np.int32(1), case.slots.numpy(), case.log_rows.numpy(), numbers, taps
    )


@pytest.mark.parametrize("shape", [MixerShape(2, 4, 20, 18), MixerShape(1, 1, 5, 7, 3)])
def test_trees_equal_the_torch_mixer(device, shape):
    case = MixerCase(shape, 3, device, num_log_rows=5, num_nodes=7)
    case.slots = torch.tensor([3, 1, 2], dtype=torch.int32)
    counts = torch.tensor([5, 0, 2])
    log = case.log(counts)
    trees = trees_of(case, counts, log)
    tokens = 1 + sum(map(len, PARENTS))
    projected = case.normal(tokens, shape.projected)
    ours = log_to(log, device)
    scratch = TreeScratch(tokens, shape.hk, shape.hv, shape.dk, shape.dv, device)
    for x in (scratch.q, scratch.beta, scratch.o):
        x.fill_(NAN)
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    out = torch.full((tokens, shape.hv * shape.dv), NAN, device=device)
    mix_trees_(
        projected.to(device), case.packed, DeviceTrees.of(trees, 8, device, padded_to=4),
        conv, state, ours, scratch, out,
    )  # fmt: skip

    judged = SpecLayer(
        mode="log", first_node=log.first_node, num_log_rows=log.num_log_rows,
        **{name: getattr(log, name).double() for name in ("conv", "k", "u", "g")},
    )  # fmt: skip
    expected = torch.full(out.shape, NAN, dtype=torch.float64)
    pools = case.conv.double(), case.state.double()
    mix_trees(projected.double(), wide(case.mixer), trees, *pools, judged, expected)
    # outputs pass through tf32 on the device
    assert error(out[1:], expected[1:]) < 1e-5
    for name in ("k", "u", "g", "conv"):
        x, y = getattr(ours, name).cpu(), getattr(judged, name)
        assert torch.equal(x.isnan(), y.isnan())
        assert error(x.nan_to_num(), y.nan_to_num()) < 1e-5
    assert torch.equal(state.cpu().nan_to_num(7), case.state.nan_to_num(7))

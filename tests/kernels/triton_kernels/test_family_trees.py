"""KDA and Mamba2 over draft trees on the GPU against their torch mixers over trees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from tests.kernels.triton_kernels.cases import NAN, error, log_to
from tests.kernels.triton_kernels.family_cases import Family
from tests.kernels.triton_kernels.test_family_prefill import FAMILIES
from tests.kernels.triton_kernels.test_trees import PARENTS, trees_of

COUNTS, ROWS = torch.tensor([5, 0, 2]), torch.tensor([2, 3, 1], dtype=torch.int32)
SLOTS = torch.tensor([3, 1, 2], dtype=torch.int32)


def log_of(family: Family, capacity: int, nodes: int, dtype: torch.dtype) -> SpecLayer:
    """``COUNTS`` valid log rows, NaN elsewhere."""
    s, rows = family.shape, capacity + nodes
    k, u = torch.randn(4, rows, s.hk, s.dk), torch.randn(4, rows, s.hv, s.dv)
    k = k / k.norm(dim=-1, keepdim=True)
    g = -(torch.rand(4, rows, s.hv, family.dg) ** 4) * 8
    conv = torch.randn(4, s.width - 1 + rows, s.channels).to(dtype)
    conv[:, : s.width - 1] = NAN
    valid = dict(zip(ROWS.tolist(), COUNTS.tolist(), strict=True))
    for row in range(4):
        for x in (k, u, g):
            x[row, valid.get(row, 0) :] = NAN
        conv[row, s.width - 1 + valid.get(row, 0) :] = NAN
    first = s.width - 1 + capacity
    return SpecLayer("log", conv, first, num_log_rows=capacity, k=k, u=u, g=g)


def tree_errors(
    family: Family, device: torch.device, dtype: torch.dtype, *, capacity: int = 5
) -> tuple[float, float]:
    """Of outputs and (the worst) of the draft buffers; what may not be touched is asserted."""
    s, tokens = family.shape, 1 + sum(map(len, PARENTS))
    log = log_of(family, capacity, max(map(len, PARENTS)), dtype)
    trees = trees_of(SimpleNamespace(shape=s, slots=SLOTS, log_rows=ROWS), COUNTS, log)
    given = [torch.randn(tokens, size).to(dtype) for size in family.sizes]
    conv = torch.randn(5, s.width - 1, s.channels).to(dtype)
    state = torch.randn(5, s.hv, s.dk, s.dv)
    conv[[0, 4]] = NAN
    state[[0, 4]] = NAN
    pools, ours = [x.clone().to(device) for x in (conv, state)], log_to(log, device)
    out = torch.full((tokens, s.hv * s.dv), NAN, dtype=dtype, device=device)
    padded = DeviceTrees.of(trees, 8, device, padded_to=4)
    family.mix_trees([x.to(device) for x in given], padded, pools, ours, out)

    judged = SpecLayer(
        mode="log", first_node=log.first_node, num_log_rows=capacity,
        **{x: getattr(log, x).double() for x in ("conv", "k", "u", "g")},
    )  # fmt: skip
    expected = torch.full(out.shape, NAN, dtype=torch.float64)
    wide_pools = [conv.double(), state.double()]
    family.twin_trees([x.double() for x in given], trees, wide_pools, judged, expected)
    for before, after in zip((conv, state), pools, strict=True):
        assert torch.equal(after.cpu().nan_to_num(7), before.nan_to_num(7))
    worst = 0.0
    for x in ("k", "u", "g", "conv"):
        found, wanted = getattr(ours, x).cpu(), getattr(judged, x)
        assert torch.equal(found.isnan(), wanted.isnan())
        worst = max(worst, error(found.nan_to_num(), wanted.nan_to_num()))
    return error(out[1:], expected[1:]), worst


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trees_equal_the_torch_mixer(device, name, dtype):
    torch.manual_seed(1)
    found = tree_errors(FAMILIES[name](device), device, dtype)
    # outputs pass through tf32 on the device
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert found[0] < limit
    assert found[1] < 1e-5

"""Decode steps of KDA and Mamba2, in place and by a log that grows, against their torch mixers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.kda import reference as kda_reference
from hyradix.kernels.kda import triton as kda
from hyradix.kernels.mamba2 import reference as mamba2_reference
from hyradix.kernels.mamba2 import triton as mamba2
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from tests.kernels.triton_kernels.cases import NAN, error
from tests.kernels.triton_kernels.family_cases import wide

WIDTH, CAPACITY, TOKENS = 4, 4, 3
SLOTS = torch.tensor([3, 0, 1], dtype=torch.int32)
ROWS = torch.tensor([1, 2, 3], dtype=torch.int32)
REAL = [0, 2]


def one_token_each() -> RaggedStates:
    none, offsets = np.zeros(0, np.int32), np.zeros(len(REAL) + 1, np.int32)
    cu = np.arange(len(REAL) + 1, dtype=np.int32)
    return RaggedStates(cu, SLOTS[REAL].numpy(), offsets, none, none)


def kda_case(device, hk, hv, dk, dv, lower_bound):
    del hk
    channels = hv * (2 * dk + dv)
    raw = kda_reference.KdaWeights(
        num_heads=hv, conv=torch.randn(channels, WIDTH), rate=torch.rand(hv) * 4,
        dt_bias=torch.randn(hv * dk), norm=torch.randn(dv), eps=1e-6, lower_bound=lower_bound,
    )  # fmt: skip
    weights, scratch = kda.DeviceKda.of(raw, device), kda.KdaScratch(3, hv, dk, dv, device)
    sizes = (channels + hv, hv * dk, hv * dv)

    def ours(given, pools, out, **log):
        return kda.step_(*given, weights, SLOTS.to(device), *pools, scratch, out, **log)

    def twin(given, pools):
        return kda_reference.mix(*given, wide(raw), one_token_each(), *pools)

    return sizes, channels, dk, ours, twin


def mamba2_case(device, hk, hv, dk, dv, limits):
    channels = 2 * hk * dk + hv * dv
    raw = mamba2_reference.Mamba2Weights(
        num_k_heads=hk, conv=torch.randn(channels, WIDTH) * 0.5, conv_bias=torch.randn(channels),
        decay_rate=-torch.rand(hv) * 4, dt_bias=torch.randn(hv), dt_limits=limits,
        skip=torch.randn(hv), norm=torch.randn(hv * dv), num_norm_groups=hk, eps=1e-5,
    )  # fmt: skip
    weights = mamba2.DeviceMamba2.of(raw, device)
    scratch = mamba2.Mamba2Scratch(3, hk, hv, dk, dv, device)

    def ours(given, pools, out, **log):
        return mamba2.step_(*given, weights, SLOTS.to(device), *pools, scratch, out, **log)

    def twin(given, pools):
        return mamba2_reference.mix(*given, wide(raw), one_token_each(), *pools)

    return (channels + hv * dv + hv,), channels, 1, ours, twin


CASES = {
    "kda": (kda_case, 3, 3, 6, 10, None),
    "kda bounded": (kda_case, 2, 2, 5, 4, -5.0),
    "mamba2": (mamba2_case, 2, 6, 5, 8, (0.0, float("inf"))),
    "mamba2 clamped": (mamba2_case, 1, 3, 4, 3, (0.1, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_mixer(device, name):
    assert run_steps(device, *CASES[name]) < 1e-5


def run_steps(device, make, hk, hv, dk, dv, option) -> float:
    """Some tokens by both ways of stepping; the largest error of outputs and states."""
    torch.manual_seed(0)
    sizes, channels, dg, ours, twin = make(device, hk, hv, dk, dv, option)
    conv, state = torch.randn(5, WIDTH - 1, channels), torch.randn(5, hv, dk, dv)
    conv[0] = state[0] = conv[[2, 4]] = state[[2, 4]] = NAN
    bases = conv.clone().to(device), state.clone().to(device)
    in_place = conv.clone().to(device), state.clone().to(device)
    expected = conv.double(), state.double()
    k, u, g, columns = (
        torch.full((4, CAPACITY + extra, *shape), NAN, device=device)
        for extra, shape in (
            (0, (hk, dk)), (0, (hv, dv)), (0, (hv, dg)), (WIDTH - 1, (channels,))
        )
    )  # fmt: skip
    log = SpecLayer(
        mode="log", conv=columns, first_node=WIDTH - 1 + CAPACITY, num_log_rows=CAPACITY,
        k=k, u=u, g=g,
    )  # fmt: skip
    counts, worst = torch.zeros(3, dtype=torch.int32, device=device), 0.0
    for _ in range(TOKENS):
        given = [torch.randn(3, size) for size in sizes]
        there = [x.to(device) for x in given]
        results = [torch.full((3, hv * dv), NAN, device=device) for _ in range(2)]
        ours(there, in_place, results[0])
        ours(there, bases, results[1], rows=ROWS.to(device), num_log_rows=counts, log=log)
        counts += 1
        o = twin([x[REAL].double() for x in given], expected)
        for out in results:
            worst = max(worst, error(out[REAL], o))
            assert out[1].isfinite().all()
    slots = SLOTS[REAL].long()
    worst = max(worst, error(in_place[1].cpu()[slots], expected[1][slots]))
    assert torch.equal(in_place[0].cpu()[slots].double(), expected[0][slots])
    assert torch.equal(bases[1].cpu().nan_to_num(7), state.nan_to_num(7))
    assert torch.equal(bases[0].cpu().nan_to_num(7), conv.nan_to_num(7))
    for x in (k, u, g):
        assert x[[1, 3], :TOKENS].isfinite().all()
        assert x[:, TOKENS:].isnan().all()
        assert x[[0, 2]].isnan().all()
    return worst

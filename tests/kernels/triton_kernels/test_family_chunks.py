"""KDA and Mamba2 by chunks over a ragged batch against their definitions, saves included."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.kda import triton_chunks as kda
from hyradix.kernels.kda.triton_solve import KdaChunkScratch
from hyradix.kernels.mamba2 import triton_chunks as mamba2
from hyradix.kernels.tree_recurrence.chunked import naive
from hyradix.kernels.tree_recurrence.rules import KDA, MAMBA2, Inputs
from tests.kernels.triton_kernels.cases import NAN, error
from tests.kernels.triton_kernels.family_cases import poisoned
from tests.kernels.triton_kernels.test_chunks import on_device

LENGTHS, SLOTS = [64, 130, 1, 17, 3], [3, 1, 2, 4, 5]
SAVES = {0: [(5, 6), (48, 7)], 1: [(1, 8), (64, 9), (129, 10)], 4: [(2, 11)]}
DECAYS = {
    "weak": lambda x: -(x**4) * 0.05,
    "mixed": lambda x: -(x**6) * 20,
    "strong": lambda x: -20 * x,
    "none": lambda x: x * 0.0,
}


def compare(device, ours, state, o, run) -> None:
    """Outputs, final states and saves against ``run(sequence's tokens, initial)`` in float64."""
    begin, untouched = 0, {0, *range(12, state.shape[0])}
    for i, length in enumerate(LENGTHS):
        own = slice(begin, begin + length)
        expected, states = run(own, state[SLOTS[i]].double())
        # outputs pass through tf32 on the device
        assert error(o[own], expected) < 1e-5
        assert error(ours[SLOTS[i]], states[-1]) < 1e-5
        for count, slot in SAVES.get(i, []):
            assert error(ours[slot], states[count - 1]) < 1e-5
        begin += length
    assert ours[list(untouched)].isnan().all()


@pytest.mark.parametrize(
    ("decay", "beta"),
    [*((decay, "random") for decay in DECAYS), *(("mixed", beta) for beta in (0, 1, 2))],
)
def test_kda(device, decay, beta):
    torch.manual_seed(0)
    total, heads, dk, dv = sum(LENGTHS), 2, 20, 18
    k = torch.randn(total, heads, dk)
    k[70:110] = k[70]  # keys that repeat, over blocks and a chunk's end
    k[150:160] = -k[150]
    k = k / k.norm(dim=-1, keepdim=True)
    q, v = torch.randn(total, heads, dk) * dk**-0.5, torch.randn(total, heads, dv)
    g = DECAYS[decay](torch.rand(total, heads, dk))
    betas = torch.rand(total, heads)
    if beta != "random":
        betas = torch.where(torch.rand(total, heads) < 0.8, float(beta), betas)
    scratch = poisoned(KdaChunkScratch(total, heads, dk, dv, device))
    scratch.mixed.copy_(torch.cat([x.flatten(1) for x in (q, k, v)], 1))
    scratch.g.copy_(g)
    scratch.beta.copy_(betas)
    state = torch.full((14, heads, dk, dv), NAN)
    state[SLOTS] = torch.randn(len(SLOTS), heads, dk, dv)
    ours = state.clone().to(device)
    kda.chunked_(on_device(LENGTHS, SAVES, SLOTS, device), ours, scratch, torch.float32)

    def run(own, initial):
        inputs = Inputs(*(x[own].double() for x in (k, v, g, betas)))
        return naive(KDA, q[own].double(), inputs, initial)

    compare(device, ours, state, scratch.o, run)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", [(1, 3, 20, 18), (2, 4, 33, 5), (1, 2, 150, 7)])
def test_mamba2(device, decay, shape):
    torch.manual_seed(0)
    total, (hk, hv, dk, dv) = sum(LENGTHS), shape
    q, k = (torch.randn(total, hk, dk) for _ in "qk")
    v, dt = torch.randn(total, hv, dv), torch.rand(total, hv)
    g = DECAYS[decay](torch.rand(total, hv))
    scratch = poisoned(mamba2.Mamba2ChunkScratch(total, *shape, device))
    scratch.mixed.copy_(torch.cat([x.flatten(1) for x in (q, k, v)], 1))
    scratch.g.copy_(g)
    scratch.dt.copy_(dt)
    state = torch.full((14, hv, dk, dv), NAN)
    state[SLOTS] = torch.randn(len(SLOTS), hv, dk, dv)
    ours = state.clone().to(device)
    mamba2.chunked_(on_device(LENGTHS, SAVES, SLOTS, device), hk, ours, scratch, torch.float32)

    def run(own, initial):
        inputs = Inputs(*(x[own].double() for x in (k, v, g.unsqueeze(2), dt)))
        return naive(MAMBA2, q[own].double(), inputs, initial)

    compare(device, ours, state, scratch.o, run)


def test_inverse_keeps_its_digits_where_keys_repeat(device):
    """All keys equal and no decay: A is beta everywhere, its powers grow beyond float32."""
    heads, dk, dv, total = 1, 4, 16, 64
    for beta in (1.0, 1.99, 2.0):
        k = torch.zeros(total, heads, dk)
        k[..., 0] = 1
        v = torch.randn(total, heads, dv)
        scratch = poisoned(KdaChunkScratch(total, heads, dk, dv, device))
        scratch.mixed.copy_(torch.cat([x.flatten(1) for x in (k, k, v)], 1))
        scratch.g.fill_(0)
        scratch.beta.fill_(beta)
        ours = torch.randn(2, heads, dk, dv)
        initial = ours[1].double()
        ours = ours.to(device)
        kda.chunked_(on_device([total], {}, [1], device), ours, scratch, torch.float32)
        zero, one = torch.zeros(total, heads, dk), torch.ones(total, heads) * beta
        inputs = Inputs(*(x.double() for x in (k, v, zero, one)))
        o, states = naive(KDA, k.double(), inputs, initial)
        assert error(ours[1], states[-1]) < 1e-5
        assert error(scratch.o, o) < 1e-5

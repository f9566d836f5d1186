"""The mixers of KDA and Mamba2 over ragged batches on the GPU against the torch mixers."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.device_forms import DeviceStates
from tests.kernels.triton_kernels.cases import NAN, MixerShape, error
from tests.kernels.triton_kernels.family_cases import Family, kda_family, mamba2_family
from tests.kernels.triton_kernels.test_prefill import ragged

LENGTHS, SLOTS = [67, 1, 4, 2], [3, 1, 2, 4]
SAVES = [(0, 1, 5), (0, 2, 6), (0, 64, 7), (0, 66, 8), (2, 2, 9)]

FAMILIES = {
    "kda": lambda device: kda_family(MixerShape(3, 3, 6, 10), device),
    "kda strong": lambda device: kda_family(MixerShape(2, 2, 5, 7, 3), device, rate=16),
    "kda bounded": lambda device: kda_family(MixerShape(1, 1, 16, 20), device, lower_bound=-5.0),
    "mamba2": lambda device: mamba2_family(MixerShape(2, 6, 5, 8), device),
    "mamba2 clamped": lambda device: mamba2_family(
        MixerShape(1, 3, 20, 3, 3), device, dt_limits=(0.1, 0.5)
    ),
}


def prefill_errors(
    family: Family,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    slots: list[int],
    saves: list[tuple[int, int, int]],
) -> tuple[float, float]:
    """Of outputs and (the worst) of states; windows and what may not be touched are asserted.

    Slots are numbered from 1 on, without gaps; two tokens of no sequence stand behind the batch.
    """
    s, total = family.shape, sum(lengths)
    batch, count = ragged(lengths, slots, saves), len(slots) + len(saves) + 2
    given = [torch.randn(total + 2, size).to(dtype) for size in family.sizes]
    conv = torch.randn(count, s.width - 1, s.channels).to(dtype)
    state = torch.randn(count, s.hv, s.dk, s.dv)
    for pool in (conv, state):
        pool[[0, count - 1, *(slot for _, _, slot in saves)]] = NAN
    pools = [x.clone().to(device) for x in (conv, state)]
    out = torch.full((total + 2, s.hv * s.dv), NAN, dtype=dtype, device=device)
    family.mix([x.to(device) for x in given], DeviceStates.of(batch, device), pools, out)
    judged = [conv.double(), state.double()]
    expected = family.twin([x[:total].double() for x in given], batch, judged)
    assert out[total:].isnan().all()
    assert pools[1][[0, count - 1]].isnan().all()
    assert torch.equal(pools[0].cpu().double().nan_to_num(7), judged[0].nan_to_num(7))
    worst = max(error(pools[1][i], judged[1][i]) for i in range(1, count - 1))
    return error(out[:total], expected), worst


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_equals_the_torch_mixer(device, name, dtype):
    torch.manual_seed(0)
    found = prefill_errors(FAMILIES[name](device), device, dtype, LENGTHS, SLOTS, SAVES)
    # outputs pass through tf32 on the device
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert found[0] < limit
    assert found[1] < 1e-5


def test_a_split_prefill_equals_a_whole_one(device):
    """Two calls, cut where a save stood: the same states and windows."""
    torch.manual_seed(0)
    for make in (kda_family, mamba2_family):
        family = make(MixerShape(2, 2, 6, 8), device)
        s, count, cut = family.shape, 40, 23
        given = [torch.randn(count, size, device=device) for size in family.sizes]
        conv = torch.randn(3, s.width - 1, s.channels, device=device)
        state = torch.randn(3, s.hv, s.dk, s.dv, device=device)
        whole, parts = ([conv.clone(), state.clone()] for _ in range(2))
        out = torch.empty(count, s.hv * s.dv, device=device)
        split = torch.empty_like(out)
        batch = DeviceStates.of(ragged([count], [1], [(0, cut, 2)]), device)
        family.mix(given, batch, whole, out)
        for piece in (slice(0, cut), slice(cut, count)):
            own = [x[piece] for x in given]
            batch = DeviceStates.of(ragged([own[0].shape[0]], [1], []), device)
            family.mix(own, batch, parts, split[piece])
        assert torch.equal(out, split)
        for x, y in zip(whole, parts, strict=True):
            assert torch.equal(x[1], y[1])

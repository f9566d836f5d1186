"""The mixer over a ragged batch on the GPU against the torch mixer, saves and windows included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.reference import RaggedStates, mix
from hyradix.kernels.gated_delta_net.triton_prefill import mix_
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch
from tests.kernels.triton_kernels.cases import NAN, MixerCase, MixerShape, error, wide


def ragged(lengths: list[int], slots: list[int], saves: list[tuple[int, int, int]]) -> RaggedStates:
    """saves: (sequence, count, slot), sorted."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    for sequence, _, _ in saves:
        offsets[sequence + 1 :] += 1
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    at, there = ([x[i] for x in saves] for i in (1, 2))
    return RaggedStates(cu, *(np.array(x, np.int32) for x in (slots, offsets, at, there)))


WIDE = MixerShape(3, 6, 40, 72)
CASES = [
    (MixerShape(1, 2, 8, 12), torch.float32), (MixerShape(2, 2, 5, 7, 3), torch.float32),
    (WIDE, torch.float32), (WIDE, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_prefill_equals_the_torch_mixer(device, shape, dtype):
    case = MixerCase(shape, 8, device, dtype=dtype)
    lengths, slots = [67, 1, 4], [3, 1, 2]
    batch = ragged(lengths, slots, [(0, 1, 5), (0, 66, 6), (2, 2, 7)])
    total = sum(lengths)
    projected = case.normal(total + 2, shape.projected).to(dtype)  # two tokens of no sequence
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    scratch = ChunkScratch(total, shape.hk, shape.hv, shape.dk, shape.dv, device)
    out = torch.full((total + 2, shape.hv * shape.dv), NAN, dtype=dtype, device=device)
    mix_(
        projected.to(device), case.packed, DeviceStates.of(batch, device), conv, state, scratch, out
    )
    expected_conv, expected_state = case.conv.double(), case.state.double()
    expected = mix(
        projected[:total].double(), wide(case.mixer), batch, expected_conv, expected_state
    )
    # outputs pass through tf32 on the device
    assert error(out[:total], expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert out[total:].isnan().all()
    assert error(state[1:9], expected_state[1:9]) < 1e-5
    assert torch.equal(conv.cpu().double().nan_to_num(7), expected_conv.nan_to_num(7))
    assert state[[0, 9]].isnan().all()

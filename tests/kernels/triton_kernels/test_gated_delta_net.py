"""Decode steps of a gated delta net: in place, and by a log, against the torch mixer in float64."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.gated_delta_net.triton import step_
from hyradix.kernels.gated_delta_net.triton_log import log_step_
from hyradix.kernels.tree_recurrence.rules import Rows
from hyradix.kernels.tree_recurrence.state_log import folded
from hyradix.kernels.triton_table import StepConfig
from tests.kernels.triton_kernels.cases import (
    NAN,
    MixerCase,
    MixerShape,
    error,
    folded_pools,
    log_to,
    mixed,
)

SHAPES = [MixerShape(2, 4, 8, 16), MixerShape(1, 3, 5, 7, 3)]
CONFIGS = [
    StepConfig(4),
    StepConfig(16, 2),
    StepConfig(4, is_fused=False),
    StepConfig(16, is_fused=False),
    StepConfig(16, is_fused=False, block_k=2, stages=3),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_step_in_place_equals_the_mixer(device, shape, config):
    case = MixerCase(shape, 3, device)
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    expected_conv, expected_state = case.conv.double(), case.state.double()
    for _ in range(2):  # the counters are 0 again, the windows have moved
        out = torch.full((3, shape.hv * shape.dv), NAN, device=device)
        step_(
            case.projected.to(device), case.packed, case.slots.to(device), conv, state,
            case.scratch, out, config=config,
        )  # fmt: skip
        expected = mixed(case, expected_conv, expected_state)
        assert error(out, expected) < 1e-5
        assert torch.equal(out[1].cpu(), torch.zeros(shape.hv * shape.dv))
        case.projected = case.projected.flip(0)
    slots = case.slots[case.slots > 0].long()
    assert error(state[slots.to(device)], expected_state[slots]) < 1e-6
    assert torch.equal(conv.cpu()[slots].double(), expected_conv[slots])
    unused = [0, *sorted(set(range(1, 5)) - set(slots.tolist()))]
    assert torch.equal(conv[unused].cpu().nan_to_num(7), case.conv[unused].nan_to_num(7))
    assert torch.equal(state[unused].cpu().nan_to_num(7), case.state[unused].nan_to_num(7))
    assert not case.scratch.counters.any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_step_by_log_equals_a_fold_and_the_mixer(device, shape, config):
    case = MixerCase(shape, 4, device, num_log_rows=5, num_nodes=2)
    counts = torch.tensor([0, 3, 1, 4])
    log = case.log(counts)
    conv, state, ours = (
        case.conv.clone().to(device),
        case.state.clone().to(device),
        log_to(log, device),
    )
    out = torch.full((4, shape.hv * shape.dv), NAN, device=device)
    log_step_(
        case.projected.to(device), case.packed, case.slots.to(device), case.log_rows.to(device),
        counts.int().to(device), conv, state, ours, case.scratch, out, config=config,
    )  # fmt: skip
    assert torch.equal(state.cpu().nan_to_num(7), case.state.nan_to_num(7))
    assert torch.equal(conv.cpu().nan_to_num(7), case.conv.nan_to_num(7))

    expected_conv, expected_state = folded_pools(case, log, counts)
    expected = mixed(case, expected_conv, expected_state)
    assert error(out, expected) < 1e-5
    for n in range(4):
        row, count, slot = int(case.log_rows[n]), int(counts[n]), int(case.slots[n])
        if not slot:
            assert ours.u[row, count].isnan().all()
            continue
        for x in (ours.k, ours.u, ours.g):
            assert x[row, count + 1 :].isnan().all()
        rows = Rows(
            *(x[row : row + 1, : count + 1].double().cpu() for x in (ours.k, ours.u, ours.g))
        )
        base = case.state[slot].double().unsqueeze(0)
        after = folded(base, rows, torch.tensor([count + 1]))[0]
        assert error(after, expected_state[slot]) < 1e-6
        column = ours.conv[row, shape.width - 1 + count].cpu()
        assert torch.equal(column, case.projected[n, : shape.channels])


def test_bfloat16_activations_leave_float32_states(device):
    case = MixerCase(SHAPES[0], 2, device, dtype=torch.bfloat16)
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    expected_state = case.state.double()
    expected = mixed(case, case.conv.double(), expected_state)
    out = torch.full(expected.shape, NAN, dtype=torch.bfloat16, device=device)
    step_(
        case.projected.to(device),
        case.packed,
        case.slots.to(device),
        conv,
        state,
        case.scratch,
        out,
    )
    assert error(out, expected) < 1e-2
    assert error(state[1:3], expected_state[1:3]) < 1e-6

"""Decode steps of all recurrences, and the short convolution alone, against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.triton import conv_log_step_, conv_step_
from hyradix.kernels.tree_recurrence.rules import RULES, Rows, read, update
from hyradix.kernels.tree_recurrence.state_log import folded
from hyradix.kernels.tree_recurrence.triton_step import log_step_, step_
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
from hyradix.kernels.triton_table import StepConfig
from tests.kernels.tree_recurrence.cases import make_case, parts
from tests.kernels.triton_kernels.cases import NAN, MixerCase, MixerShape, error, log_to

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
CONFIG = StepConfig(4)
SLOTS = torch.tensor([2, 0, 3], dtype=torch.int32)


def tokens_of(rule):
    """A base, a log and one token for three rows; the second is padding."""
    case = make_case(rule, 3, parents=[[-1]] * 3, max_rows=4, dims=(6, 7))
    pool = torch.full((5, *case.base.shape[1:]), NAN)
    pool[SLOTS.long()] = case.base
    pool[0] = NAN
    token = [x[:, 0].contiguous() for x in (case.q, *parts(case.inputs))]
    return case, pool, token


def inputs_of(rule, batch, device):
    """Between the launches of a step by a log."""
    return StreamInputs(batch, 4 if rule.has_channel_decay else 2, 4, 6, 7, device)


@rules
def test_step_in_place_is_one_update(device, rule):
    _, pool, token = tokens_of(rule)
    ours, out = pool.clone().to(device), torch.full((3, 4, 7), NAN, device=device)
    step_(rule, *(x.to(device) for x in token), SLOTS.to(device), ours, out, config=CONFIG)
    q, *inputs = (x.double() for x in token)
    for n in (0, 2):
        slot = int(SLOTS[n])
        _, after = update(rule, pool[slot].double(), *(x[n] for x in inputs))
        assert error(ours[slot], after) < 1e-6
        assert error(out[n], read(after, q[n])) < 1e-5
    assert not out[1].any()
    assert ours[[0, 1, 4]].isnan().all()


@rules
@pytest.mark.parametrize("config", [CONFIG, StepConfig(8, is_fused=False)])
def test_step_by_log_is_one_update_behind_a_fold(device, rule, config):
    case, pool, token = tokens_of(rule)
    counts, capacity = torch.tensor([4, 1, 0]), 5
    rows = torch.tensor([3, 1, 2], dtype=torch.int32)
    case, _, _ = tokens_of(rule)
    shape = MixerCase(MixerShape(1, 1, 4, 4), 3, device, num_log_rows=capacity)
    spec = shape.log(counts)
    arrays = []
    for x in parts(case.log):
        array = torch.full((4, capacity, *x.shape[2:]), NAN)
        for n in range(3):
            filled = torch.where(x[n].isnan(), 0.3, x[n])  # valid rows may be fewer there
            array[rows[n], : counts[n]] = filled[: counts[n]]
        arrays.append(array)
    for name, array in zip(("k", "u", "g"), arrays, strict=True):
        object.__setattr__(spec, name, array)
    ours, log = pool.clone().to(device), log_to(spec, device)
    out = torch.full((3, 4, 7), NAN, device=device)
    log_step_(
        rule, *(x.to(device) for x in token), SLOTS.to(device), rows.to(device),
        counts.int().to(device), ours, log, inputs_of(rule, 3, device), out, config=config,
    )  # fmt: skip
    assert torch.equal(ours.cpu().nan_to_num(7), pool.nan_to_num(7))
    q, *inputs = (x.double() for x in token)
    for n in (0, 2):
        row, count = int(rows[n]), int(counts[n])
        logged = Rows(*(x[row : row + 1, :count].double() for x in arrays))
        base = pool[int(SLOTS[n])].double().unsqueeze(0)
        before = folded(base, logged, torch.tensor([count]))[0]
        _, after = update(rule, before, *(x[n] for x in inputs))
        assert error(out[n], read(after, q[n])) < 1e-5
        appended = Rows(
            *(x[row : row + 1, : count + 1].double().cpu() for x in (log.k, log.u, log.g))
        )
        assert error(folded(base, appended, torch.tensor([count + 1]))[0], after) < 1e-6
    assert log.u[1, 1].isnan().all()
    assert not out[1].any()


def test_convolution_alone(device):
    shape = MixerShape(2, 2, 6, 130, 4)
    case = MixerCase(shape, 3, device, num_log_rows=5)
    channels, counts = shape.channels, torch.tensor([2, 0, 4])
    x, bias = case.projected[:, :channels], case.normal(channels)
    log = case.log(counts)
    windows, ours = case.conv.clone().to(device), log_to(log, device)
    given = (x.to(device), case.packed.conv, bias.to(device), case.slots.to(device))
    by_log = torch.full((3, channels), NAN, device=device)
    before = windows.clone()
    conv_log_step_(*given, case.log_rows.to(device), counts.int().to(device), windows, ours, by_log)
    assert torch.equal(windows.nan_to_num(7), before.nan_to_num(7))
    in_place = torch.full((3, channels), NAN, device=device)
    conv_step_(*given, windows, in_place)
    for n in range(3):
        slot, row, count = int(case.slots[n]), int(case.log_rows[n]), int(counts[n])
        if not slot:
            assert not by_log[n].any()
            assert not in_place[n].any()
            continue
        first = shape.width - 1
        logged = torch.cat([case.conv[slot], log.conv[row, first : first + count]])[-first:]
        for earlier, out in ((case.conv[slot], in_place), (logged, by_log)):
            seen = torch.cat([earlier, x[n : n + 1]]).double()
            sums = (seen * case.mixer.conv.T.double()).sum(0) + bias.double()
            assert error(out[n], F.silu(sums)) < 1e-5
        assert torch.equal(windows[slot].cpu(), torch.cat([case.conv[slot, 1:], x[n : n + 1]]))
        assert torch.equal(ours.conv[row, first + count].cpu(), x[n])

"""Slots behind element 2^31 of a pool: offsets are 64 bits wide in every kernel that takes slots.

The pools are address space that nobody fills; only the slots of a case are written.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.attention.triton import AttendScratch, attend
from hyradix.kernels.attention.triton_write import write_kv
from hyradix.kernels.causal_conv.triton import conv_step_
from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.triton import step_
from hyradix.kernels.gated_delta_net.triton_log import log_step_
from hyradix.kernels.gated_delta_net.triton_prefill import mix_
from hyradix.kernels.gated_delta_net.triton_tree import mix_trees_
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch
from hyradix.kernels.rotary.reference import rotary_table
from hyradix.kernels.state_slots.triton import Registry, move_slots_
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves, fold_
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch
from hyradix.kernels.triton_table import AttendConfig, StepConfig
from tests.kernels.triton_kernels.attention_cases import AttentionCase
from tests.kernels.triton_kernels.cases import NAN, MixerCase, MixerShape, log_to
from tests.kernels.triton_kernels.conftest import IS_INTERPRETED
from tests.kernels.triton_kernels.test_keeping import arrays_of, moves_of, to
from tests.kernels.triton_kernels.test_prefill import ragged
from tests.kernels.triton_kernels.test_trees import PARENTS, trees_of

MAP_NORESERVE = 0x4000  # Linux; the module does not name it before 3.13
CPU, SHAPE = torch.device("cpu"), MixerShape(2, 4, 8, 16)
pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="the memory of a device is not sparse")


@pytest.fixture(autouse=True)
def _arguments_stay():
    """The interpreter copies whole arguments back to themselves."""
    with mock.patch.object(GridExecutor, "_restore_args_dev"):
        yield


def far(*pools: torch.Tensor, dim: int = 0) -> tuple[list[torch.Tensor], int]:
    """Each at the end of a pool of over 2^31 elements, and by how much their slots are higher."""
    offset = 2**31 // min(x[(0,) * (dim + 1)].numel() for x in pools) + 1
    found = []
    for x in pools:
        shape = (*x.shape[:dim], offset + x.shape[dim], *x.shape[dim + 1 :])
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, math.prod(shape) * x.element_size(), flags)
        pool = torch.frombuffer(memory, dtype=x.dtype).view(shape)
        pool.narrow(dim, offset, x.shape[dim]).copy_(x)
        found.append(pool)
    return found, offset


def moved(slots: torch.Tensor, offset: int) -> torch.Tensor:
    """Slot 0 stays padding."""
    return torch.where(slots == 0, 0, slots + offset).int()


def pools_of(case: MixerCase) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(offset of slots, windows, states): as they are, and far out."""
    yield 0, case.conv.clone(), case.state.clone()
    (conv, state), offset = far(case.conv, case.state)
    yield offset, conv, state


def logs_of(log: SpecLayer) -> Iterator[tuple[int, SpecLayer]]:
    """(offset of rows, log): the same of a log."""
    yield 0, log_to(log, CPU)
    (k, u, g, conv), offset = far(log.k, log.u, log.g, log.conv)
    rows = dict(first_node=log.first_node, num_log_rows=log.num_log_rows)
    yield offset, SpecLayer(mode="log", conv=conv, k=k, u=u, g=g, **rows)


def test_step_in_place():
    case = MixerCase(SHAPE, 3, CPU)
    results = []
    for offset, conv, state in pools_of(case):
        out = torch.full((3, SHAPE.hv * SHAPE.dv), NAN)
        slots = moved(case.slots, offset)
        step_(
            case.projected, case.packed, slots, conv, state, case.scratch, out,
            config=StepConfig(16),
        )  # fmt: skip
        results.append((out, conv[offset + 1 :], state[offset + 1 :]))
    _equal(*results)


def test_step_by_log():
    case = MixerCase(SHAPE, 4, CPU, num_log_rows=5)
    counts = torch.tensor([0, 3, 1, 4])
    logs = case.log(counts)
    results = []
    for (offset, conv, state), (by, log) in zip(pools_of(case), logs_of(logs), strict=True):
        out = torch.full((4, SHAPE.hv * SHAPE.dv), NAN)
        log_step_(
            case.projected, case.packed, moved(case.slots, offset), case.log_rows + by,
            counts.int(), conv, state, log, case.scratch, out, config=StepConfig(16),
        )  # fmt: skip
        results.append((out, log.k[by:], log.u[by:], log.g[by:], log.conv[by:]))
    _equal(*results)


def test_trees():
    case = MixerCase(SHAPE, 3, CPU, num_log_rows=5, num_nodes=7)
    counts, rows = torch.tensor([5, 0, 2]), case.log_rows
    logs, tokens = case.log(counts), 1 + sum(map(len, PARENTS))
    projected = case.normal(tokens, SHAPE.projected)
    results = []
    for (offset, conv, state), (by, log) in zip(pools_of(case), logs_of(logs), strict=True):
        case.slots = torch.tensor([3, 1, 2], dtype=torch.int32) + offset
        case.log_rows = rows + by
        trees = DeviceTrees.of(trees_of(case, counts, log), 8, CPU, padded_to=4)
        scratch = TreeScratch(tokens, SHAPE.hk, SHAPE.hv, SHAPE.dk, SHAPE.dv, CPU)
        scratch.o.zero_()
        out = torch.full((tokens, SHAPE.hv * SHAPE.dv), NAN)
        mix_trees_(projected, case.packed, trees, conv, state, log, scratch, out)
        results.append((out, log.k[by:], log.u[by:], log.g[by:], log.conv[by:]))
    _equal(*results)


def test_prefill():
    case = MixerCase(SHAPE, 8, CPU)
    lengths, saves = [6, 1], [(0, 1, 5), (0, 5, 6)]
    projected = case.normal(sum(lengths), SHAPE.projected)
    results = []
    for offset, conv, state in pools_of(case):
        there = [(i, count, slot + offset) for i, count, slot in saves]
        batch = DeviceStates.of(ragged(lengths, [3 + offset, 1 + offset], there), CPU)
        scratch = ChunkScratch(sum(lengths), SHAPE.hk, SHAPE.hv, SHAPE.dk, SHAPE.dv, CPU)
        out = torch.full((sum(lengths), SHAPE.hv * SHAPE.dv), NAN)
        mix_(projected, case.packed, batch, conv, state, scratch, out)
        results.append((out, conv[offset + 1 :], state[offset + 1 :]))
    _equal(*results)


def test_convolution_alone():
    case = MixerCase(SHAPE, 3, CPU)
    results = []
    for offset, conv, _ in pools_of(case):
        out = torch.full((3, SHAPE.channels), NAN)
        x = case.projected[:, : SHAPE.channels]
        conv_step_(x, case.packed.conv, None, moved(case.slots, offset), conv, out)
        results.append((out, conv[offset + 1 :]))
    _equal(*results)


def test_attention():
    case, config = AttentionCase(6, 2, 10, 10, [7, 20], [1, 1]), AttendConfig(16, 8, 2, 4, 2)
    angles = rotary_table(40, 4, 10_000.0)
    weights = AttentionWeights(6, 2, 10, 1e-6, torch.ones(10), torch.ones(10), angles)
    x = torch.randn(2, 2 * 8 * 10)
    results = []
    for (k, v), offset in (((case.k.clone(), case.v.clone()), 0), far(case.k, case.v)):
        q = torch.full((2, 6, 10), NAN)
        positions = torch.tensor([7, 20], dtype=torch.int32)
        last = case.table[case.rows.long(), positions.long()] + offset
        write_kv(x, weights, positions, last.int(), q, k, v)
        out = torch.full((2, 60), NAN)
        queries = case.queries(config, CPU)
        queries.kv_table.add_(offset)
        attend(q, queries, k, v, 0.2, config, AttendScratch(64, 6, 10, CPU), out)
        queries.kv_table.sub_(offset)
        results.append((out, k[offset:], v[offset:]))
    _equal(*results)


def test_folds_and_copies():
    small = arrays_of(2, 4, 8, 6, 1, torch.float32)
    results = []
    arrays = to(small, CPU)
    given = (arrays.recurrent, arrays.windows)
    for pools, offset in ((given, 0), far(small.recurrent, small.windows, dim=1)):
        arrays = dataclasses.replace(to(small, CPU), recurrent=pools[0], windows=pools[1])
        moves = moves_of([3, 5, 2, 0])
        for x in (moves.sources, moves.targets):
            x[x > 0] += offset
        fold_(arrays, DeviceMoves.of(moves, CPU))
        numbers = (torch.tensor([x], dtype=torch.int32) for x in (3 + offset, 4 + offset))
        move_slots_(Registry([arrays.recurrent, arrays.windows]), *numbers)
        results.append((arrays.recurrent[:, offset:], arrays.windows[:, offset:]))
    _equal(*results)


def _equal(expected, found) -> None:
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))

"""Folds, node copies, and the movers of whole slots and rows, against their torch twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.state_slots import reference
from hyradix.kernels.state_slots.triton import Registry, move_rows_, move_slots_
from hyradix.kernels.tree_recurrence import keeping
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import window_taps
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves, copy_nodes_, fold_
from hyradix.kernels.triton_table import FoldConfig
from tests.kernels.triton_kernels.cases import NAN, error

LAYERS, SLOTS, ROWS, R, T, WIDTH = 2, 6, 4, 5, 3, 4


def arrays_of(hk: int, hv: int, dk: int, dv: int, dg: int, dtype: torch.dtype) -> StateArrays:
    torch.manual_seed(0)
    channels = 7

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(LAYERS, ROWS, R + T, *shape)

    return StateArrays(
        recurrent=torch.randn(LAYERS, SLOTS, hv, dk, dv),
        windows=torch.randn(LAYERS, SLOTS, WIDTH - 1, channels).to(dtype),
        conv=torch.randn(LAYERS, ROWS, WIDTH - 1 + R + T, channels).to(dtype),
        states=torch.randn(LAYERS, ROWS, T, hv, dk, dv),
        k=rows(hk, dk),
        u=rows(hv, dv),
        g=-rows(hv, dg).square() * 3,
    )


def to(arrays: StateArrays, where: torch.device | torch.dtype) -> StateArrays:
    names = ("recurrent", "windows", "conv", "states", "k", "u", "g")
    return StateArrays(**{name: getattr(arrays, name).clone().to(where) for name in names})


def moves_of(counts: list[int]) -> Moves:
    """Slot 2 in place, slot 3 to slot 5, a sink, slot 1 in place."""
    numbers = np.array(counts, np.int32)
    taps = window_taps(numbers, width=WIDTH, first_row=WIDTH - 1)
    sources, targets, rows = ([2, 3, 0, 1], [2, 5, 0, 1], [3, 1, 0, 2])
    return Moves(*(np.array(x, np.int32) for x in (sources, targets, rows)), numbers, taps)


@pytest.mark.parametrize("shape", [(2, 4, 8, 6, 1), (1, 2, 5, 16, 5), (3, 3, 16, 4, 16)])
@pytest.mark.parametrize("config", [FoldConfig(4), FoldConfig(16, stages=3)])
def test_fold_equals_its_twin(device, shape, config):
    arrays = arrays_of(*shape, torch.float32)
    moves = moves_of([3, 5, 2, 0])
    for x in (arrays.k, arrays.u, arrays.g):  # rows past a count are not read
        x[:, 3, 3:] = x[:, 2] = x[:, 0] = NAN
    arrays.recurrent[:, 0] = NAN
    ours, expected = to(arrays, device), to(arrays, torch.float64)
    fold_(ours, DeviceMoves.of(moves, device), config=config)
    real = [0, 1, 3]
    real_moves = Moves(*(getattr(moves, name)[real] for name in Moves.__slots__))
    keeping.fold(GDN, expected, real_moves)
    assert error(ours.recurrent[:, 1:], expected.recurrent[:, 1:]) < 1e-6
    assert torch.equal(ours.recurrent[:, [1, 3, 4]].cpu(), arrays.recurrent[:, [1, 3, 4]])
    assert torch.equal(ours.windows.cpu().double(), expected.windows)


def test_node_copies_equal_their_twin(device):
    arrays = arrays_of(2, 4, 8, 6, 1, torch.bfloat16)
    moves = moves_of([2, 0, 1, 1])
    ours, expected = to(arrays, device), to(arrays, torch.device("cpu"))
    copy_nodes_(ours, DeviceMoves.of(moves, device, padded_to=5))
    real_moves = Moves(*(getattr(moves, name)[[0, 1, 3]] for name in Moves.__slots__))
    keeping.copy_nodes(expected, real_moves)
    assert torch.equal(ours.recurrent.cpu(), expected.recurrent)
    assert torch.equal(ours.windows.cpu(), expected.windows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_cleared_and_copied_in_all_tensors(device, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5, 4, 1100), torch.randn(3, 5, 3, 7).to(dtype), torch.randn(1, 5, 9)]
    ours = [x.clone().to(device) for x in tensors]
    sources, targets = (torch.tensor(x, dtype=torch.int32) for x in ([1, -1, -1, 0], [4, 2, 0, 0]))
    move_slots_(Registry(ours), sources.to(device), targets.to(device))
    reference.move_slots_(tensors, sources, targets)
    for x, y in zip(ours, tensors, strict=True):
        assert torch.equal(x.cpu(), y)


def test_rows_move_in_order(device):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 9, 3, 5), torch.randn(2, 4, 12, 7).bfloat16()]
    ours = [x.clone().to(device) for x in tensors]
    rows, firsts, counts = (
        torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 3, 1], [0, 0, 3, 1], [4, 2, 3, 0])
    )
    sources = torch.tensor(
        [[2, 3, 4, 5], [1, 2, 0, 0], [4, 6, 8, 0], [5, 6, 7, 8]], dtype=torch.int32
    )
    move_rows_(Registry(ours, (0, 3)), *(x.to(device) for x in (rows, sources, firsts, counts)))
    reference.move_rows_(list(zip(tensors, (0, 3), strict=True)), rows, sources, firsts, counts)
    for x, y in zip(ours, tensors, strict=True):
        assert torch.equal(x.cpu(), y)

"""Checks and timings of what moves whole states: folds, node copies, clears and copies of slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import BATCHES, Bench, Call, Check, Checks
from hyradix.kernels.state_slots.triton import Registry, move_rows_, move_slots_
from hyradix.kernels.tree_recurrence import keeping
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import window_taps
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves, copy_nodes_, fold_
from hyradix.kernels.triton_table import FoldConfig
from tests.kernels.triton_kernels.cases import NAN, error

LAYERS, R, NODES, WIDTH = 24, 16, 4, 4
HK, HV, DK, DV, CHANNELS = 16, 32, 128, 128, 8192
NAMES = ("recurrent", "windows", "conv", "states", "k", "u", "g")
_SLOT = HV * DK * DV * 4 + (WIDTH - 1) * CHANNELS * 2


def checks(device: torch.device) -> Iterator[Checks]:
    for shape in (
        (3, 6, 40, 72, 1),
        (2, 2, 33, 17, 33),
        (HK, HV, DK, DV, 1),
        (4, 4, 128, 128, 128),
    ):
        name = f"fold, {shape}"
        yield Checks(name, partial(_check_fold, shape, name, device))


def _check_fold(
    shape: tuple[int, int, int, int, int], name: str, device: torch.device
) -> Iterator[Check]:
    small = _arrays(2, 5, *shape, 70, torch.device("cpu"))
    counts = np.array([R, 3, 9, 0], np.int32)
    taps = window_taps(counts, width=WIDTH, first_row=WIDTH - 1)
    numbers = ([2, 3, 0, 1], [2, 4, 0, 1], [3, 1, 0, 2])
    moves = Moves(*(np.array(x, np.int32) for x in numbers), counts, taps)
    for x in (small.k, small.u, small.g):
        x[:, 1, 3:] = x[:, 2] = x[:, 0] = NAN
    real = Moves(*(getattr(moves, name)[[0, 1, 3]] for name in Moves.__slots__))
    expected = _copy(small, dtype=torch.float64)
    keeping.fold(GDN, expected, real)
    ours = _copy(small, device=device)
    fold_(ours, DeviceMoves.of(moves, device))
    found = ours.recurrent[:, 1:]
    yield Check(name, error(found, expected.recurrent[:, 1:]), 1e-5)
    same = torch.equal(ours.windows[:, 1:].cpu().double(), expected.windows[:, 1:])
    yield Check(f"{name}: windows", 0.0 if same else 1.0, 0.0)


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    for batch in BATCHES:
        configs: list[FoldConfig | None] = [None]
        if tune:
            shapes = ((16, 1), (32, 2), (64, 4))
            configs += [FoldConfig(*shape, stages) for shape in shapes for stages in (4, 6)]
        for config in configs:
            for count in (4, R):
                yield _bench_fold(batch, count, config, device)
    for batch in (1, 8, 64):
        yield _bench_slots(batch, device)
        yield _bench_nodes(batch, device)
    yield _bench_rows(64, device)


def _arrays(
    layers: int, slots: int, hk: int, hv: int, dk: int, dv: int, dg: int, channels: int,
    device: torch.device, *, nodes: int = 0,
) -> StateArrays:  # fmt: skip
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rows = (layers, slots, R)
    columns = (layers, slots, WIDTH - 1 + max(R, nodes), channels)
    return StateArrays(
        recurrent=normal(layers, slots, hv, dk, dv),
        windows=normal(layers, slots, WIDTH - 1, channels, dtype=torch.bfloat16),
        conv=normal(*columns, dtype=torch.bfloat16),
        states=normal(layers, slots, nodes, hv, dk, dv) if nodes else None,
        k=normal(*rows, hk, dk) * dk**-0.5,
        u=normal(*rows, hv, dv),
        g=-torch.rand(*rows, hv, dg, device=device),
    )


def _copy(
    arrays: StateArrays, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> StateArrays:
    given = {name: getattr(arrays, name) for name in NAMES}
    return StateArrays(
        **{
            name: None if x is None else x.clone().to(device=device, dtype=dtype or x.dtype)
            for name, x in given.items()
        }
    )


def _moves(batch: int, count: int, device: torch.device) -> DeviceMoves:
    slots = np.arange(1, batch + 1, dtype=np.int32)
    counts = np.full(batch, count, np.int32)
    taps = window_taps(counts, width=WIDTH, first_row=WIDTH - 1)
    return DeviceMoves.of(Moves(slots, slots, slots, counts, taps), device)


def _layers_of(batch: int, parts: int) -> int:
    """All 24 layers, or as many as 40 GB hold."""
    return max(1, min(LAYERS, int(40e9 // (batch * parts * _SLOT))))


def _bench_fold(batch: int, count: int, config: FoldConfig | None, device: torch.device) -> Bench:
    layers = _layers_of(batch, 1)

    def build(sets: int) -> list[Call]:
        def call() -> Call:
            arrays = _arrays(layers, batch + 1, HK, HV, DK, DV, 1, CHANNELS, device)
            moves = _moves(batch, count, device)
            return lambda: fold_(arrays, moves, config=config)

        return [call() for _ in range(sets)]

    row = (HK * DK + HV * DV + HV) * 4
    num_bytes = batch * layers * (2 * _SLOT + count * row)
    note = f"{layers} layers {config or ''}"
    return Bench(f"fold of {count} rows", batch, num_bytes, build, note=note, config=config)


def _bench_slots(batch: int, device: torch.device) -> Bench:
    layers = _layers_of(batch, 2)

    def build(sets: int) -> list[Call]:
        def call() -> Call:
            shape = (layers, 2 * batch + 1)
            tensors = [
                torch.randn(*shape, HV, DK, DV, device=device),
                torch.randn(*shape, WIDTH - 1, CHANNELS, device=device).bfloat16(),
            ]
            registry = Registry(tensors)
            sources = torch.arange(1, batch + 1, dtype=torch.int32).to(device)
            targets = torch.arange(batch + 1, 2 * batch + 1, dtype=torch.int32).to(device)
            return lambda: move_slots_(registry, sources, targets)

        return [call() for _ in range(min(sets, 4))]

    num_bytes = batch * layers * 2 * _SLOT
    return Bench("copy of state slots", batch, num_bytes, build, note=f"{layers} layers")


def _bench_nodes(batch: int, device: torch.device) -> Bench:
    layers = _layers_of(batch, NODES + 1)

    def build(sets: int) -> list[Call]:
        def call() -> Call:
            shape = (layers, batch + 1, HK, HV, DK, DV, 1, CHANNELS)
            arrays = _arrays(*shape, device, nodes=NODES)
            moves = _moves(batch, 2, device)
            return lambda: copy_nodes_(arrays, moves)

        return [call() for _ in range(min(sets, 2))]

    num_bytes = batch * layers * 2 * _SLOT
    return Bench("copy of node states", batch, num_bytes, build, note=f"{layers} layers")


def _bench_rows(batch: int, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        del sets
        arrays = _arrays(LAYERS, batch + 1, HK, HV, DK, DV, 1, CHANNELS, device)
        registry = Registry([arrays.k, arrays.u, arrays.g, arrays.conv], (0, 0, 0, WIDTH - 1))
        rows = torch.arange(1, batch + 1, dtype=torch.int32).to(device)
        firsts = torch.full((batch,), 2, dtype=torch.int32).to(device)
        counts = torch.full((batch,), 4, dtype=torch.int32).to(device)
        sources = torch.tensor([[8, 9, 10, 11]] * batch, dtype=torch.int32).to(device)
        return [lambda: move_rows_(registry, rows, sources, firsts, counts)]

    row = (HK * DK + HV * DV + HV) * 4 + CHANNELS * 2
    return Bench("4 log rows appended", batch, batch * LAYERS * 8 * row, build)

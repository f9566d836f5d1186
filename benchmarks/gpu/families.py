"""Checks and timings of prefill and draft trees of KDA and Mamba2, whole mixers.

Shapes: as in ``rules.py``, bfloat16 activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Call, Check, Checks
from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from hyradix.kernels.triton_table import ChunkConfig
from tests.kernels.triton_kernels.cases import MixerShape
from tests.kernels.triton_kernels.family_cases import Family, kda_family, mamba2_family
from tests.kernels.triton_kernels.test_family_prefill import prefill_errors
from tests.kernels.triton_kernels.test_family_trees import tree_errors
from tests.kernels.triton_kernels.test_prefill import ragged

Make = Callable[[torch.device], Family]
R, LOGGED = 16, 8
BFLOAT16 = torch.bfloat16
LIMITS = {torch.float32: 2e-3, BFLOAT16: 1e-2}
SERVED: dict[str, Make] = {
    "kda": lambda device: kda_family(MixerShape(32, 32, 128, 128), device),
    "mamba2": lambda device: mamba2_family(MixerShape(1, 48, 128, 64), device),
}
OTHERS: dict[str, Make] = {
    "kda, strong decay": lambda device: kda_family(MixerShape(3, 3, 40, 72), device, rate=16),
    "kda, bounded": lambda device: kda_family(MixerShape(2, 2, 64, 64), device, lower_bound=-5.0),
    "mamba2, 8 groups": lambda device: mamba2_family(MixerShape(8, 16, 128, 64), device),
    "mamba2, odd": lambda device: mamba2_family(
        MixerShape(3, 6, 33, 17, 3), device, dt_limits=(0.1, 0.5)
    ),
}


def checks(device: torch.device) -> Iterator[Checks]:
    for make_checks in (_check_prefill, _check_trees):
        for name, make in {**SERVED, **OTHERS}.items():
            for dtype in (torch.float32, BFLOAT16):
                label = f"{name}, {str(dtype).removeprefix('torch.')}"
                run = partial(make_checks, make, label, dtype, device)
                yield Checks(f"{make_checks.__name__.removeprefix('_check_')}, {label}", run)


def _check_prefill(
    make: Make, label: str, dtype: torch.dtype, device: torch.device
) -> Iterator[Check]:
    lengths, slots = [333, 1, 70, 2], [2, 1, 4, 3]
    saves = [(0, 1, 5), (0, 65, 6), (0, 128, 7), (0, 332, 8), (2, 64, 9)]
    found = prefill_errors(make(device), device, dtype, lengths, slots, saves)
    yield Check(f"prefill, {label}", found[0], LIMITS[dtype])
    yield Check(f"prefill, {label}: states", found[1], 1e-5)


def _check_trees(
    make: Make, label: str, dtype: torch.dtype, device: torch.device
) -> Iterator[Check]:
    found = tree_errors(make(device), device, dtype, capacity=R)
    yield Check(f"trees, {label}", found[0], LIMITS[dtype])
    yield Check(f"trees, {label}: rows", found[1], 1e-5)


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    configs: list[ChunkConfig | None] = [None]
    if tune:
        configs += [ChunkConfig(v, s, p) for v in (16, 32) for s in (4, 8) for p in (4, 8)]
    for name in SERVED:
        for lengths in ([8_192], [512], [1_024] * 8, [16] * 64):
            for config in configs:
                yield _bench_prefill(name, lengths, config, device)
        for batch, nodes in ((1, 4), (64, 4), (8, 64)):
            yield _bench_trees(name, batch, nodes, device)


def _bench_prefill(
    name: str, lengths: list[int], config: ChunkConfig | None, device: torch.device
) -> Bench:
    total, count = sum(lengths), len(lengths)
    shape, sizes = _described(name)

    def build(sets: int) -> list[Call]:
        family = SERVED[name](device)
        slots = list(range(1, count + 1))
        batch = DeviceStates.of(ragged(lengths, slots, []), device)
        scratch = family.chunk_scratch(total)
        out = torch.empty(total, shape.hv * shape.dv, dtype=BFLOAT16, device=device)
        mix_ = family.modules[2].mix_

        def call() -> Call:
            given, pools = _inputs(family, total, count, device)
            return lambda: mix_(*given, family.weights, batch, *pools, scratch, out, config=config)

        return [call() for _ in range(min(sets, 4))]

    num_bytes = total * (sum(sizes) + shape.hv * shape.dv) * 2 + 2 * count * _state_bytes(shape)
    # with chunks of 64, by head and token: products of q and k; q S, k^T u, (q k) u; with a delta
    # k k^T, T k, T v, w S too
    products = 64 * (shape.dk * shape.hk / shape.hv + shape.dv) + 2 * shape.dk * shape.dv
    if name == "kda":
        products += 64 * (2 * shape.dk + shape.dv) + shape.dk * shape.dv
    flops = int(total * shape.hv * 2 * products)
    note = "" if config is None else str(config)
    return Bench(f"{name} prefill, {count} x {lengths[0]}", count, num_bytes, build, flops, note)


def _bench_trees(name: str, batch: int, nodes: int, device: torch.device) -> Bench:
    shape, sizes = _described(name)
    dg = shape.dk if name == "kda" else 1
    row = shape.hk * shape.dk + shape.hv * (shape.dv + dg)

    def build(sets: int) -> list[Call]:
        family = SERVED[name](device)
        trees = DeviceTrees.of(_trees(batch, nodes, shape.width), nodes, device)
        tokens = batch * nodes
        scratch = family.tree_scratch(tokens, batch, nodes, R)
        out = torch.empty(tokens, shape.hv * shape.dv, dtype=BFLOAT16, device=device)

        def call() -> Call:
            given, pools = _inputs(family, tokens, batch, device)
            spec = _log(shape, dg, batch, nodes, device)
            return lambda: family.modules[3].mix_trees_(
                *given, family.weights, trees, *pools, spec, scratch, out
            )

        return [call() for _ in range(min(sets, 8))]

    num_bytes = batch * (_state_bytes(shape) + (LOGGED + 2 * nodes) * row * 4)
    num_bytes += batch * nodes * (sum(sizes) + shape.hv * shape.dv) * 2
    return Bench(f"{name} mixer, tree of {nodes}", batch, num_bytes, build)


def _described(name: str) -> tuple[MixerShape, tuple[int, ...]]:
    family = SERVED[name](torch.device("meta"))
    return family.shape, family.sizes


def _state_bytes(shape: MixerShape) -> int:
    return shape.hv * shape.dk * shape.dv * 4


def _inputs(
    family: Family, tokens: int, slots: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What tokens bring, and pools of that many slots and the sink."""
    s = family.shape
    given = [torch.randn(tokens, size, device=device).to(BFLOAT16) for size in family.sizes]
    conv = torch.randn(slots + 1, s.width - 1, s.channels, device=device).to(BFLOAT16)
    return given, [conv, torch.randn(slots + 1, s.hv, s.dk, s.dv, device=device)]


def _trees(batch: int, nodes: int, width: int) -> RaggedTrees:
    """Chains, or beams of eight levels, behind ``LOGGED`` rows each."""
    level = max(1, nodes // 8)
    parents = np.array([-1] + [max(0, i - level) for i in range(1, nodes)], np.int32)
    cu = np.arange(batch + 1, dtype=np.int32) * np.int32(nodes)
    flat = FlatTrees.of(cu, np.tile(parents, batch))
    slots, counts = np.arange(1, batch + 1, dtype=np.int32), np.full(batch, LOGGED, np.int32)
    taps = taps_of(flat, counts, width=width, first_node=width - 1 + R, first_row=width - 1)
    return RaggedTrees(flat, cu[:-1], slots, slots, counts, taps)


def _log(shape: MixerShape, dg: int, batch: int, nodes: int, device: torch.device) -> SpecLayer:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(batch + 1, *sizes, device=device)

    rows, width = R + nodes, shape.width
    return SpecLayer(
        mode="log", conv=normal(width - 1 + rows, shape.channels).to(BFLOAT16),
        first_node=width - 1 + R, num_log_rows=R, k=normal(rows, shape.hk, shape.dk) * 0.1,
        u=normal(rows, shape.hv, shape.dv), g=-torch.rand(batch + 1, rows, shape.hv, dg).to(device),
    )  # fmt: skip

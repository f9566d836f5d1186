"""Checks and timings of the recurrent kernels: decode steps, draft trees, folds, movers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import BATCHES, Bench, Call, Check, Checks
from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.gated_delta_net.tree_reference import mix_trees
from hyradix.kernels.gated_delta_net.triton import step_
from hyradix.kernels.gated_delta_net.triton_log import log_step_
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, StepScratch
from hyradix.kernels.gated_delta_net.triton_tree import mix_trees_
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.rules import Rows
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.state_log import folded
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch
from hyradix.kernels.triton_table import StepConfig, VerifyConfig
from tests.kernels.triton_kernels.cases import (
    NAN,
    MixerCase,
    MixerShape,
    error,
    folded_pools,
    log_to,
    mixed,
    wide,
)

B4 = MixerShape(16, 32, 128, 128)
"""The recurrent layers of the 4b shape (PERFORMANCE.md, section 4)."""
SHAPES = (MixerShape(3, 6, 40, 72, 4), MixerShape(1, 2, 33, 17, 3), B4)
R, LOGGED = 16, 8
BFLOAT16 = torch.bfloat16
CHECKED = (
    None,
    StepConfig(64, 4),
    StepConfig(32, 1, is_fused=False),
    StepConfig(128, 4, is_fused=False),
    StepConfig(128, 1, is_fused=False, block_k=8, stages=3),
)


def checks(device: torch.device) -> Iterator[Checks]:
    for nodes in (64, 5):
        for shape in reversed(SHAPES):
            name = f"tree of {nodes}, {described(shape)}"
            yield Checks(name, partial(_check_trees, shape, nodes, name, device))
    for shape in reversed(SHAPES):
        for config in CHECKED if shape == B4 else CHECKED[:1]:
            name = described(shape) if config is None else f"{described(shape)}, {config}"
            given = (shape, name, config, device)
            yield Checks(f"log step, {name}", partial(_check_log, *given))
            yield Checks(f"step, {name}", partial(_check_step, *given))


def described(shape: MixerShape) -> str:
    """Its name in a check's."""
    return f"{shape.hk}/{shape.hv} heads of {shape.dk}x{shape.dv}"


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    for batch in BATCHES:
        for config in (None, *(_candidates(batch, is_log=False) if tune else ())):
            yield _bench_step(batch, config, device)
        for config in (None, *(_candidates(batch, is_log=True) if tune else ())):
            yield _bench_log(batch, config, device)
    for batch in (1, 8, 64):
        for nodes in (4, 16, 64):
            verify: list[VerifyConfig | None] = [None]
            if tune:
                verify += [VerifyConfig(v, w, k) for v, w, k in ((16, 1, 16), (16, 2, 16))]
                verify += [VerifyConfig(32, 4, 16)] if nodes <= 32 else []
            for tree_config in verify:
                yield bench_trees(batch, nodes, tree_config, device)


def _candidates(batch: int, *, is_log: bool) -> list[StepConfig]:
    """One launch where rows are few; where they are many, launches whose last is a pure stream."""
    shapes = ((16, 1), (32, 2), (64, 4)) if batch <= 8 else ()
    configs = [StepConfig(*shape) for shape in shapes]
    shapes = ((32, 1),) if batch <= 8 else ((64, 2), (128, 4))
    configs += [StepConfig(*shape, is_fused=False) for shape in shapes]
    if is_log:
        rows = ((128, 8, 3), (128, 8, 4), (128, 16, 3), (64, 8, 3))
        configs += [StepConfig(v, 1, is_fused=False, block_k=k, stages=s) for v, k, s in rows]
    return configs


def _check_step(
    shape: MixerShape, name: str, config: StepConfig | None, device: torch.device
) -> Iterator[Check]:
    case = MixerCase(shape, 5, device, dtype=BFLOAT16)
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    out = torch.full((5, shape.hv * shape.dv), NAN, dtype=BFLOAT16, device=device)
    expected_conv, expected_state = case.conv.double(), case.state.double()
    for _ in range(3):
        step_(
            case.projected.to(device), case.packed, case.slots.to(device), conv, state,
            case.scratch, out, config=config,
        )  # fmt: skip
        expected = mixed(case, expected_conv, expected_state)
    slots = case.slots[case.slots > 0].long()
    yield Check(f"step, {name}", error(out, expected), 1e-2)
    yield Check(f"step, {name}: states", error(state.cpu()[slots], expected_state[slots]), 1e-5)
    same = torch.equal(conv.cpu()[slots].double(), expected_conv[slots])
    yield Check(f"step, {name}: windows", 0.0 if same else 1.0, 0.0)


def _check_log(
    shape: MixerShape, name: str, config: StepConfig | None, device: torch.device
) -> Iterator[Check]:
    case = MixerCase(shape, 5, device, dtype=BFLOAT16, num_log_rows=R)
    counts = torch.tensor([0, 3, 15, 8, 1])
    log = case.log(counts)
    ours = log_to(log, device)
    out = torch.full((5, shape.hv * shape.dv), NAN, dtype=BFLOAT16, device=device)
    log_step_(
        case.projected.to(device), case.packed, case.slots.to(device), case.log_rows.to(device),
        counts.int().to(device), case.conv.to(device), case.state.to(device), ours, case.scratch,
        out, config=config,
    )  # fmt: skip
    conv, state = folded_pools(case, log, counts)
    yield Check(f"log step, {name}", error(out, mixed(case, conv, state)), 1e-2)
    worst = 0.0
    for n in (i for i in range(5) if int(case.slots[i])):
        row, count, slot = int(case.log_rows[n]), int(counts[n]) + 1, int(case.slots[n])
        rows = Rows(*(x[row : row + 1, :count].double().cpu() for x in (ours.k, ours.u, ours.g)))
        after = folded(case.state[slot].double().unsqueeze(0), rows, torch.tensor([count]))[0]
        worst = max(worst, error(after, state[slot]))
    yield Check(f"log step, {name}: folded", worst, 1e-5)


def _check_trees(shape: MixerShape, nodes: int, name: str, device: torch.device) -> Iterator[Check]:
    generator = np.random.default_rng(0)
    sizes = [nodes, 1, nodes - 3]
    parents = [
        np.array([-1] + [generator.integers(max(0, i - 4), i) for i in range(1, size)])
        for size in sizes
    ]
    case = MixerCase(shape, 3, device, num_log_rows=R, num_nodes=nodes)
    case.slots = torch.tensor([3, 1, 2], dtype=torch.int32)
    counts = torch.tensor([R, 0, 7])
    log = case.log(counts)
    trees = _trees(parents, case.slots, case.log_rows, counts, shape.width, log.first_node)
    total = sum(sizes)
    projected = case.normal(total, shape.projected).to(BFLOAT16)
    ours, scratch = log_to(log, device), _tree_scratch(shape, total, device)
    out = torch.full((total, shape.hv * shape.dv), NAN, dtype=BFLOAT16, device=device)
    mix_trees_(
        projected.to(device), case.packed, DeviceTrees.of(trees, nodes, device, padded_to=4),
        case.conv.to(device), case.state.to(device), ours, scratch, out,
    )  # fmt: skip
    judged = SpecLayer(
        mode="log", first_node=log.first_node, num_log_rows=R,
        **{x: getattr(log, x).double() for x in ("conv", "k", "u", "g")},
    )  # fmt: skip
    expected = torch.full(out.shape, NAN, dtype=torch.float64)
    pools = case.conv.double(), case.state.double()
    mix_trees(projected.double(), wide(case.mixer), trees, *pools, judged, expected)
    yield Check(name, error(out, expected), 1e-2)
    u, expected_u = ours.u.cpu(), judged.u
    is_written = torch.equal(u.isnan(), expected_u.isnan())
    worst = error(u.nan_to_num(), expected_u.nan_to_num()) if is_written else float("inf")
    yield Check(f"{name}: u", worst, 1e-5)


def _trees(
    parents: list[np.ndarray],
    slots: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    first_node: int,
) -> RaggedTrees:
    cu = np.concatenate([[0], np.cumsum([len(x) for x in parents])]).astype(np.int32)
    flat = FlatTrees.of(cu, np.concatenate(parents).astype(np.int32))
    numbers = counts.int().numpy()
    taps = taps_of(flat, numbers, width=width, first_node=first_node, first_row=width - 1)
    return RaggedTrees(flat, cu[:-1], slots.numpy(), rows.numpy(), numbers, taps)


def _tree_scratch(shape: MixerShape, tokens: int, device: torch.device) -> TreeScratch:
    return TreeScratch(tokens, shape.hk, shape.hv, shape.dk, shape.dv, device)


class _Layers:
    """``sets`` layers of the 4b shape on the device, ``batch`` rows each."""

    def __init__(self, sets: int, batch: int, nodes: int, device: torch.device) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        s = B4
        self.weights = PackedMixer.of(
            MixerWeights(
                s.hk, normal(s.channels, s.width) * 0.5, -torch.rand(s.hv, device=device),
                normal(s.hv), normal(s.dv), 1e-6,
            ),
            device,
        )  # fmt: skip
        self.conv = normal(sets, batch + 1, s.width - 1, s.channels, dtype=BFLOAT16)
        self.state = normal(sets, batch + 1, s.hv, s.dk, s.dv)
        tokens = batch * max(nodes, 1)
        self.projected = normal(sets, tokens, s.projected, dtype=BFLOAT16)
        self.slots = torch.arange(1, batch + 1, dtype=torch.int32).to(device)
        self.counts = torch.full((batch,), LOGGED, dtype=torch.int32).to(device)
        self.scratch = StepScratch(batch, s.hk, s.hv, s.dk, s.dv, device)
        self.out = torch.empty(tokens, s.hv * s.dv, dtype=BFLOAT16, device=device)
        rows = R + nodes
        k = normal(sets, batch + 1, rows, s.hk, s.dk) * s.dk**-0.5
        u = normal(sets, batch + 1, rows, s.hv, s.dv)
        g = -torch.rand(sets, batch + 1, rows, s.hv, 1, device=device)
        columns = normal(sets, batch + 1, s.width - 1 + rows, s.channels, dtype=BFLOAT16)
        self.logs = [
            SpecLayer(
                mode="log", conv=columns[i], first_node=s.width - 1 + R, num_log_rows=R,
                k=k[i], u=u[i], g=g[i],
            )
            for i in range(sets)
        ]  # fmt: skip


_STATE = B4.hv * B4.dk * B4.dv * 4
_LOG_ROW = (B4.hk * B4.dk + B4.hv * B4.dv + B4.hv) * 4 + B4.channels * 2
_TOKEN = (B4.projected + B4.hv * B4.dv) * 2


def _bench_step(batch: int, config: StepConfig | None, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        x = _Layers(sets, batch, 0, device)

        def call(i: int) -> Call:
            return lambda: step_(
                x.projected[i], x.weights, x.slots, x.conv[i], x.state[i], x.scratch, x.out,
                config=config,
            )  # fmt: skip

        return [call(i) for i in range(sets)]

    num_bytes = batch * (2 * _STATE + 2 * (B4.width - 1) * B4.channels * 2 + _TOKEN)
    return Bench("gdn step in place", batch, num_bytes, build, note=_label(config), config=config)


def _bench_log(batch: int, config: StepConfig | None, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        x = _Layers(sets, batch, 0, device)

        def call(i: int) -> Call:
            return lambda: log_step_(
                x.projected[i], x.weights, x.slots, x.slots, x.counts, x.conv[i], x.state[i],
                x.logs[i], x.scratch, x.out, config=config,
            )  # fmt: skip

        return [call(i) for i in range(sets)]

    num_bytes = batch * (_STATE + (LOGGED + 1) * _LOG_ROW + _TOKEN)
    return Bench(
        f"gdn step, log of {LOGGED}", batch, num_bytes, build, note=_label(config), config=config
    )


def bench_trees(batch: int, nodes: int, config: VerifyConfig | None, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        x = _Layers(sets, batch, nodes, device)
        depth = nodes if nodes <= 4 else 8  # a chain, or a beam of eight levels
        width = nodes // depth
        parents = np.array([-1] + [max(0, i - width) for i in range(1, nodes)])
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        counts = torch.full((batch,), LOGGED)
        trees = DeviceTrees.of(
            _trees([parents] * batch, slots, slots, counts, B4.width, x.logs[0].first_node),
            nodes,
            device,
        )
        scratch = _tree_scratch(B4, batch * nodes, device)

        def call(i: int) -> Call:
            return lambda: mix_trees_(
                x.projected[i], x.weights, trees, x.conv[i], x.state[i], x.logs[i], scratch,
                x.out, config=config,
            )  # fmt: skip

        return [call(i) for i in range(sets)]

    num_bytes = batch * (_STATE + (LOGGED + nodes) * _LOG_ROW + nodes * _TOKEN)
    return Bench(
        f"gdn tree of {nodes}", batch, num_bytes, build, note=_label(config), config=config
    )


def _label(config: object) -> str:
    return "" if config is None else str(config)

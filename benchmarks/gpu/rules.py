"""Checks and timings of the recurrences without a fused step: KDA and Mamba2 by state slot.

Shapes: KDA as in a 48B model (32 heads of 128 x 128); Mamba2: one group, 48 heads of 128 x 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Call, Check, Checks
from hyradix.kernels.causal_conv.triton import conv_step_
from hyradix.kernels.tree_recurrence.rules import KDA, MAMBA2, Rows, Rule, read, update
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.state_log import folded
from hyradix.kernels.tree_recurrence.triton_channels import ChannelScratch
from hyradix.kernels.tree_recurrence.triton_step import log_step_, step_
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
from hyradix.kernels.tree_recurrence.triton_verify import TreeScratch, verify_nodes_
from hyradix.kernels.triton_table import StepConfig
from tests.kernels.tree_recurrence.cases import make_case, parts
from tests.kernels.triton_kernels.cases import NAN, error
from tests.kernels.triton_kernels.test_families import CASES, kda_case, mamba2_case, run_steps
from tests.kernels.triton_kernels.test_verify_rules import spec_of, trees_of

SHAPES = {KDA: ((32, 32), (128, 128)), MAMBA2: ((1, 48), (128, 64))}
ODD = ((2, 4), (40, 23))
R, LOGGED = 16, 8


def checks(device: torch.device) -> Iterator[Checks]:
    for rule, shape in SHAPES.items():
        for heads, dims in (shape, ODD):
            name = f"{rule.name} of {heads[1]} heads of {dims[0]}x{dims[1]}"
            given = (rule, name, heads, dims, device)
            for seed, max_nodes in ((1, 60), (0, 12)):
                run = partial(_check_verify, seed, max_nodes, *given)
                yield Checks(f"trees of up to {max_nodes}, {name}", run)
            yield Checks(f"steps, {name}", partial(_check_steps, *given))
    yield Checks("convolution", partial(_check_conv, device))
    families = {
        **CASES,
        "kda 48b": (kda_case, 32, 32, 128, 128, None),
        "mamba2 48 heads": (mamba2_case, 1, 48, 128, 64, (0.0, float("inf"))),
    }
    for name, case in families.items():
        name = f"{name}: steps of a family"
        yield Checks(name, partial(_check_family, name, case, device))


def _check_family(name: str, case: tuple[Any, ...], device: torch.device) -> Iterator[Check]:
    yield Check(name, run_steps(device, *case), 1e-5)


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    shapes = ((16, 1), (32, 1), (64, 2))
    for rule in SHAPES:
        for batch in (1, 64, 256):
            configs = [StepConfig(*shape) for shape in shapes] if tune else []
            for config in (None, *configs):
                yield _bench_step(rule, batch, False, config, device)
            configs += [StepConfig(*shape, is_fused=False) for shape in shapes] if tune else []
            for config in (None, *configs):
                yield _bench_step(rule, batch, True, config, device)
        for batch, nodes in ((1, 4), (64, 4), (8, 64)):
            yield _bench_verify(rule, batch, nodes, device)


def _check_steps(
    rule: Rule, name: str, heads: tuple[int, int], dims: tuple[int, int], device: torch.device
) -> Iterator[Check]:
    count, capacity = 7, 8
    case = make_case(rule, 1, parents=[[-1]], max_rows=capacity, heads=heads, dims=dims)
    case = replace(case, num_log_rows=torch.tensor([count]))
    logged = make_case(rule, 2, parents=[[-1, *range(7)]], heads=heads, dims=dims)
    pool = torch.full((3, *case.base.shape[1:]), NAN)
    pool[2] = case.base[0]
    token = [x[:, 0].contiguous().to(device) for x in (case.q, *parts(case.inputs))]
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    inputs = [x[0].double().cpu() for x in token]
    ours = pool.clone().to(device)
    out = torch.full((1, heads[1], dims[1]), NAN, device=device)
    step_(rule, *token, slots, ours, out)
    _, after = update(rule, pool[2].double(), *inputs[1:])
    yield Check(f"step, {name}", error(out[0], read(after, inputs[0])), 1e-5)
    yield Check(f"step, {name}: state", error(ours[2], after), 1e-5)

    arrays = []
    for x in (logged.inputs.k, logged.inputs.v, logged.inputs.g):
        array = torch.full((2, capacity, *x.shape[2:]), NAN)
        array[1, :count] = x[0, :count]
        arrays.append(array)
    k, u, g = (x.to(device) for x in arrays)
    log = SpecLayer(mode="log", conv=None, first_node=0, num_log_rows=capacity, k=k, u=u, g=g)
    one = torch.ones(1, dtype=torch.int32, device=device)
    out.fill_(NAN)
    rows = Rows(*(x[1:, :count].double() for x in arrays))
    before = folded(case.base.double(), rows, torch.tensor([count]))[0]
    _, after = update(rule, before, *inputs[1:])
    for config in (None, StepConfig(32, 1, is_fused=False)):
        between = _inputs(rule, 1, heads, dims, device)
        log_step_(
            rule, *token, slots, one, one * count, pool.to(device), log, between, out,
            config=config,
        )  # fmt: skip
        yield Check(f"log step, {name}, {config}", error(out[0], read(after, inputs[0])), 1e-5)
        rows = Rows(*(x[1:].double().cpu() for x in (k, u, g)))
        found = folded(case.base.double(), rows, torch.tensor([capacity]))[0]
        yield Check(f"log step, {name}, {config}: folded", error(found, after), 1e-5)


def _check_verify(
    seed: int, max_nodes: int, rule: Rule, name: str, heads: tuple[int, int],
    dims: tuple[int, int], device: torch.device,
) -> Iterator[Check]:  # fmt: skip
    case = make_case(rule, seed, max_nodes=max_nodes, max_rows=R, heads=heads, dims=dims)
    trees, spec = trees_of(case, device), spec_of(case)
    sizes, nodes = [case.size(n) for n in range(3)], case.q.shape[1]
    scratch = TreeScratch(sum(sizes), *heads, *dims, device)
    scratch.o.fill_(NAN)
    scratch.q.copy_(torch.cat([case.q[n, : sizes[n]] for n in range(3)]))
    scratch.beta.copy_(torch.cat([case.inputs.beta[n, : sizes[n]] for n in range(3)]))
    state = torch.full((5, *case.base.shape[1:]), NAN, device=device)
    state[[4, 1, 2]] = case.base.to(device)
    channels = None
    if rule.has_channel_decay:
        channels = ChannelScratch(4, nodes, R, heads[1], dims[0], device)
    k, u, g = (x.clone().to(device) for x in (spec.k, spec.u, spec.g))
    ours = SpecLayer(mode="log", conv=None, first_node=0, num_log_rows=R, k=k, u=u, g=g)
    verify_nodes_(rule, trees, state, ours, scratch, torch.bfloat16, channels=channels)
    oracles = [case.oracle(n) for n in range(3)]
    name = f"trees of {nodes}, {name}"
    o = torch.cat([x[0] for x in oracles])
    yield Check(name, error(scratch.o, o), 1e-2)
    found = torch.cat(
        [u[row, R : R + size].cpu() for row, size in zip((2, 3, 1), sizes, strict=True)]
    )
    expected = torch.cat([x[2].u for x in oracles])
    yield Check(f"{name}: u", error(found, expected), 1e-5)


def _check_conv(device: torch.device) -> Iterator[Check]:
    channels, width = 777, 4
    x, windows = torch.randn(3, channels), torch.randn(5, width - 1, channels)
    weight, bias = torch.randn(width, channels), torch.randn(channels)
    slots = torch.tensor([4, 0, 1], dtype=torch.int32)
    ours, out = windows.clone().to(device), torch.full((3, channels), NAN, device=device)
    given = (x.to(device), weight.to(device), bias.to(device), slots.to(device))
    conv_step_(*given, ours, out)
    seen = torch.cat([windows[slots.long()], x.unsqueeze(1)], 1).double()
    sums = (seen * weight.double()).sum(1) + bias.double()
    expected = torch.nn.functional.silu(sums)
    expected[1] = 0
    yield Check("convolution", error(out, expected), 1e-5)
    same = torch.equal(ours[[4, 1]].cpu().double(), seen[[0, 2], 1:])
    yield Check("convolution: windows", 0.0 if same else 1.0, 0.0)


def _layer(
    rule: Rule, batch: int, rows: int, tokens: int, device: torch.device
) -> tuple[torch.Tensor, SpecLayer, list[torch.Tensor]]:
    """A pool, a log, and q, k, v, g, beta of some tokens."""
    (hk, hv), (dk, dv) = SHAPES[rule]
    dg = dk if rule.has_channel_decay else 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    log = SpecLayer(
        mode="log", conv=None, first_node=0, num_log_rows=R,
        k=normal(batch + 1, rows, hk, dk) * dk**-0.5, u=normal(batch + 1, rows, hv, dv),
        g=-torch.rand(batch + 1, rows, hv, dg, device=device),
    )  # fmt: skip
    token = [
        normal(tokens, hk, dk) * dk**-0.5, normal(tokens, hk, dk) * dk**-0.5,
        normal(tokens, hv, dv), -torch.rand(tokens, hv, dg, device=device),
        torch.rand(tokens, hv, device=device),
    ]  # fmt: skip
    return normal(batch + 1, hv, dk, dv), log, token


def _bytes(rule: Rule) -> tuple[int, int]:
    """Of a state and of a log row."""
    (hk, hv), (dk, dv) = SHAPES[rule]
    dg = dk if rule.has_channel_decay else 1
    return hv * dk * dv * 4, (hk * dk + hv * (dv + dg)) * 4


def _inputs(
    rule: Rule, batch: int, heads: tuple[int, int], dims: tuple[int, int], device: torch.device
) -> StreamInputs:
    num_k_heads = heads[1] if rule.has_channel_decay else heads[0]
    return StreamInputs(batch, num_k_heads, heads[1], *dims, device)


def _bench_step(
    rule: Rule, batch: int, is_log: bool, config: StepConfig | None, device: torch.device
) -> Bench:
    def build(sets: int) -> list[Call]:
        slots = torch.arange(1, batch + 1, dtype=torch.int32).to(device)
        counts = torch.full((batch,), LOGGED, dtype=torch.int32).to(device)
        (_, hv), (_, dv) = SHAPES[rule]
        out = torch.empty(batch, hv, dv, device=device)
        between = _inputs(rule, batch, *SHAPES[rule], device)

        def call() -> Call:
            state, log, token = _layer(rule, batch, R, batch, device)
            if is_log:
                return lambda: log_step_(
                    rule, *token, slots, slots, counts, state, log, between, out, config=config
                )
            return lambda: step_(rule, *token, slots, state, out, config=config)

        return [call() for _ in range(sets)]

    state, row = _bytes(rule)
    num_bytes = batch * (state + (LOGGED + 2) * row if is_log else 2 * state + 2 * row)
    kind = f"log of {LOGGED}" if is_log else "in place"
    note = "" if config is None else str(config)
    name = f"{rule.name} step, {kind}"
    return Bench(name, batch, num_bytes, build, note=note, config=config)


def _bench_verify(rule: Rule, batch: int, nodes: int, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        heads, dims = SHAPES[rule]
        parents = [[-1] + [max(0, i - 8) if nodes > 8 else i - 1 for i in range(1, nodes)]]
        small = make_case(rule, 0, parents=parents * 3, max_rows=1, heads=(1, 1), dims=(1, 1))
        one = trees_of(small, torch.device("cpu"))
        slots = torch.arange(1, batch + 1, dtype=torch.int32)

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x[:1].expand(batch, *x.shape[1:]).contiguous().to(device)

        trees = replace(
            one,
            first_token=((slots - 1) * nodes).to(device),
            slots=slots.to(device),
            rows=slots.to(device),
            num_log_rows=torch.full((batch,), LOGGED, dtype=torch.int32).to(device),
            **{name: spread(getattr(one, name)) for name in ("num_nodes", "taps", "depths")},
            ancestors=spread(one.ancestors),
        )
        channels = None
        if rule.has_channel_decay:
            channels = ChannelScratch(batch, nodes, R, heads[1], dims[0], device)

        def call() -> Call:
            state, log, token = _layer(rule, batch, R + nodes, batch * nodes, device)
            scratch = TreeScratch(batch * nodes, *heads, *dims, device)
            scratch.q, scratch.beta = token[0], token[4]
            return lambda: verify_nodes_(
                rule, trees, state, log, scratch, torch.bfloat16, channels=channels
            )

        return [call() for _ in range(min(sets, 8))]

    state, row = _bytes(rule)
    num_bytes = batch * (state + (LOGGED + 2 * nodes) * row)
    return Bench(f"{rule.name} tree of {nodes}", batch, num_bytes, build)

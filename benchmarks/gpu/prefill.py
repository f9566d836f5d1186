"""Checks and timings of prefill through a recurrent layer: ragged convolution, chunks, windows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import LIMITS, Bench, Call, Check, Checks
from benchmarks.gpu.recurrent import B4, BFLOAT16, SHAPES, described
from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates, mix
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer
from hyradix.kernels.gated_delta_net.triton_prefill import mix_
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch, pass_, solve_
from hyradix.kernels.triton_table import ChunkConfig, chunk_config
from tests.kernels.triton_kernels.cases import NAN, MixerCase, MixerShape, error, wide

LENGTHS = ([8_192], [500], [1_024] * 8, [16] * 64)
PASS = tuple(ChunkConfig(block_v, 4, 4, stages) for block_v in (32, 64) for stages in (1, 2))


def checks(device: torch.device) -> Iterator[Checks]:
    for shape in reversed(SHAPES):
        for dtype in LIMITS:
            name = f"prefill, {described(shape)}, {str(dtype).removeprefix('torch.')}"
            yield Checks(name, partial(_check, shape, name, dtype, device))


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    for lengths in LENGTHS:
        yield bench(lengths, None, device)
        yield bench_launch("solve", lengths, None, device)
        for config in PASS if tune else (None,):
            yield bench_launch("pass", lengths, config, device)


def _ragged(lengths: list[int], saves: list[tuple[int, int, int]]) -> RaggedStates:
    """Sequences from slots 1, 2, ..; saves: (sequence, count, slot), sorted."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    for sequence, _, _ in saves:
        offsets[sequence + 1 :] += 1
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots = np.arange(1, len(lengths) + 1, dtype=np.int32)
    at, there = (np.array([x[i] for x in saves], np.int32) for i in (1, 2))
    return RaggedStates(cu, slots, offsets, at, there)


def _check(
    shape: MixerShape, name: str, dtype: torch.dtype, device: torch.device
) -> Iterator[Check]:
    case = MixerCase(shape, 9, device, dtype=dtype)
    lengths = [333, 1, 70, 2]
    batch = _ragged(lengths, [(0, 1, 6), (0, 65, 7), (0, 332, 8), (2, 64, 9)])
    total = sum(lengths)
    projected = case.normal(total, shape.projected).to(dtype)
    scratch = ChunkScratch(total, shape.hk, shape.hv, shape.dk, shape.dv, device)
    conv, state = case.conv.clone().to(device), case.state.clone().to(device)
    out = torch.full((total, shape.hv * shape.dv), NAN, dtype=dtype, device=device)
    states = DeviceStates.of(batch, device)
    mix_(projected.to(device), case.packed, states, conv, state, scratch, out)
    expected_conv, expected_state = case.conv.double(), case.state.double()
    pools = expected_conv, expected_state
    expected = mix(projected.double(), wide(case.mixer), batch, *pools)
    yield Check(name, error(out, expected), LIMITS[dtype])
    written = [1, 2, 3, 4, 6, 7, 8, 9]
    yield Check(f"{name}: states", error(state[written], expected_state[written]), 1e-5)
    same = torch.equal(conv[1:9].cpu().double(), expected_conv[1:9])
    yield Check(f"{name}: windows", 0.0 if same else 1.0, 0.0)


def bench(lengths: list[int], config: ChunkConfig | None, device: torch.device) -> Bench:
    total, count, s = sum(lengths), len(lengths), B4

    def build(sets: int) -> list[Call]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        weights = PackedMixer.of(
            MixerWeights(
                s.hk, normal(s.channels, s.width) * 0.5, -torch.rand(s.hv, device=device),
                normal(s.hv), normal(s.dv), 1e-6,
            ),
            device,
        )  # fmt: skip
        batch = DeviceStates.of(_ragged(lengths, []), device)
        scratch = ChunkScratch(total, s.hk, s.hv, s.dk, s.dv, device)
        out = torch.empty(total, s.hv * s.dv, dtype=BFLOAT16, device=device)

        def call() -> Call:
            x = normal(total, s.projected).to(BFLOAT16)
            conv = normal(count + 1, s.width - 1, s.channels)
            state = normal(count + 1, s.hv, s.dk, s.dv)
            return lambda: mix_(x, weights, batch, conv, state, scratch, out, config=config)

        return [call() for _ in range(min(sets, 4))]

    num_bytes = total * (s.projected + s.hv * s.dv) * 2 + 2 * count * s.hv * s.dk * s.dv * 4
    # with chunks of 64: k k^T, q k^T, T k, T v; then w S, q S, (q k) u, k^T u
    flops = total * s.hv * 2 * (64 * (3 * s.dk + 2 * s.dv) + 3 * s.dk * s.dv)
    name = f"gdn prefill, {count} x {lengths[0]}"
    return Bench(
        name, count, num_bytes, build, flops, "" if config is None else str(config), config
    )


def bench_launch(
    launch: str, lengths: list[int], config: ChunkConfig | None, device: torch.device
) -> Bench:
    """One of both launches over chunks alone, "solve" or "pass"."""
    chosen = config or chunk_config(device, len(lengths), B4.dk, B4.dv, is_exact=False)
    total, count, s = sum(lengths), len(lengths), B4

    def build(sets: int) -> list[Call]:
        chunks = DeviceStates.of(_ragged(lengths, []), device).chunks
        scratch = ChunkScratch(total, s.hk, s.hv, s.dk, s.dv, device)
        for x in vars(scratch).values():
            x.zero_()
        state = torch.zeros(count + 1, s.hv, s.dk, s.dv, device=device)
        if launch == "solve":
            return [lambda: solve_(chunks, scratch, chosen, is_exact=False)]
        out = torch.empty(total, s.hv, s.dv, dtype=BFLOAT16, device=device)
        return [lambda: pass_(chunks, state, scratch, chosen, out, is_exact=False)]

    keys, values = s.hk * s.dk, s.hv * s.dv
    by_token = 6 * keys + 4 * (s.hv * s.dk + 2 * values) + 2 * 64 * s.hv
    num_bytes = total * by_token
    if launch == "pass":  # outputs are bfloat16
        num_bytes += 2 * count * s.hv * s.dk * s.dv * 4 - 2 * total * values
    return Bench(
        f"gdn prefill {launch}, {count} x {lengths[0]}", count, num_bytes, build,
        note=str(config or ""), config=config,
    )  # fmt: skip

"""Checks and timings of what looks at one row at a time: norms, swiglu, embedding, argmax, and the
sum of an attention's parts. A part of the section ``dense``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import BATCHES, Bench, Call, Check
from hyradix.kernels.activation import reference as swiglu_reference
from hyradix.kernels.activation.triton import swiglu
from hyradix.kernels.argmax import reference as argmax_reference
from hyradix.kernels.argmax.triton import ArgmaxConfig, best_of
from hyradix.kernels.attention.triton import AttendScratch, combine
from hyradix.kernels.embedding.triton import embed
from hyradix.kernels.rms_norm import reference
from hyradix.kernels.rms_norm.triton import add_rms_norm, gated_rms_norm
from tests.kernels.triton_kernels.cases import NAN, error

BFLOAT16 = torch.bfloat16
HIDDEN, FFN, VOCAB = 2560, 9216, 151_936
EPS = 1e-6
HEADS, HEAD_DIM = 16, 256
PARTS = {1: 64, 8: 16, 64: 2}
"""Parts of the keys by batch, as the table chooses them for 4 KV heads."""


def row_checks(device: torch.device) -> Iterator[Check]:
    for size in (777, HIDDEN):
        x, residual = (torch.randn(5, size, device=device).to(BFLOAT16) for _ in "xr")
        weight = torch.randn(size, device=device)
        total, out = (torch.full_like(x, NAN) for _ in "to")
        add_rms_norm(x, residual, weight, EPS, total, out)
        expected = x.double() + residual.double()
        yield Check(f"add, {size}", error(total, expected), 1e-2)
        normed = reference.rms_norm(expected, weight.double(), EPS)
        yield Check(f"add and norm, {size}", error(out, normed), 1e-2)
        both, half = torch.randn(5, 2 * size, device=device).to(BFLOAT16), torch.full_like(x, NAN)
        swiglu(both, half)
        yield Check(f"swiglu, {size}", error(half, swiglu_reference.swiglu(both.double())), 1e-2)
        table = torch.randn(99, size, device=device).to(BFLOAT16)
        ids = torch.tensor([0, 98, 5, 5, 1], dtype=torch.int32, device=device)
        rows = torch.full_like(x, NAN)
        embed(table, ids, rows)
        yield Check(f"embedding, {size}", error(rows, table[ids.long()]), 0.0)
    for v_dim in (72, 128):
        x, z = (torch.randn(5, 6, v_dim, device=device).to(BFLOAT16) for _ in "xz")
        weight, out = torch.randn(v_dim, device=device), torch.full_like(x, NAN)
        gated_rms_norm(x, z, weight, EPS, out)
        expected = reference.gated_rms_norm(x.double(), z.double(), weight.double(), EPS)
        yield Check(f"gated norm, {v_dim}", error(out, expected), 1e-2)
    for size in (1_000, VOCAB):
        yield Check(f"argmax, {size}", _argmax_faults(size, device), 0.0)


def _argmax_faults(size: int, device: torch.device) -> float:
    """Tokens and faults that differ from torch's."""
    logits = torch.randn(5, size, device=device).mul_(4).round_()
    logits[1, size // 2], logits[2, 7], logits[3] = NAN, float("inf"), -float("inf")
    found, expected = (torch.full((2, 5), -9, dtype=torch.int32, device=device) for _ in "fe")
    best_of(logits, found)
    argmax_reference.best_of(logits.cpu(), out := expected.cpu())
    return float((found.cpu() != out).sum())


def row_benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    """By batch: all but products."""
    for batch in BATCHES:
        yield from _bench_elementwise(batch, device)
        candidates: list[ArgmaxConfig | None] = [None]
        if tune:
            shapes = ((1024, 4), (2048, 4), (4096, 4), (4096, 8))
            candidates += [ArgmaxConfig(*shape) for shape in shapes]
        for config in candidates:
            yield _bench_argmax(batch, config, device)
        if batch in PARTS:
            yield _bench_combine(batch, PARTS[batch], device)


def _bench_argmax(batch: int, config: ArgmaxConfig | None, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        logits = torch.randn(sets, batch, VOCAB, device=device)
        out = torch.empty(2, batch, dtype=torch.int32, device=device)

        def call(i: int) -> Call:
            return lambda: best_of(logits[i], out, config=config)

        return [call(i) for i in range(sets)]

    note = "" if config is None else str(config)
    return Bench("argmax", batch, 4 * batch * VOCAB, build, note=note, config=config)


def _bench_combine(batch: int, splits: int, device: torch.device) -> Bench:
    """Parts come from the cache, as they do behind the kernel that wrote them."""

    def build(sets: int) -> list[Call]:
        scratch = AttendScratch(batch * splits, HEADS, HEAD_DIM, device)
        scratch.o.normal_()
        scratch.lse.normal_()
        out = torch.empty(batch, HEADS * HEAD_DIM, dtype=BFLOAT16, device=device)
        gate = torch.randn_like(out)
        return [lambda: combine(scratch, splits, out, gate=gate) for _ in range(sets)]

    num_bytes = 4 * batch * splits * HEADS * (HEAD_DIM + 1)
    return Bench("combine", batch, num_bytes, build, note=f"{splits} parts")


def _bench_elementwise(batch: int, device: torch.device) -> Iterator[Bench]:
    def build_norm(sets: int) -> list[Call]:
        x = torch.randn(sets, 3, batch, HIDDEN, device=device, dtype=BFLOAT16)
        weight = torch.rand(HIDDEN, device=device)

        def call(i: int) -> Call:
            return lambda: add_rms_norm(x[i, 0], x[i, 1], weight, EPS, x[i, 1], x[i, 2])

        return [call(i) for i in range(sets)]

    def build_swiglu(sets: int) -> list[Call]:
        x = torch.randn(sets, batch, 2 * FFN, device=device, dtype=BFLOAT16)
        out = torch.empty(batch, FFN, device=device, dtype=BFLOAT16)

        def call(i: int) -> Call:
            return lambda: swiglu(x[i], out)

        return [call(i) for i in range(sets)]

    def build_embed(sets: int) -> list[Call]:
        weight = torch.randn(VOCAB, HIDDEN, device=device, dtype=BFLOAT16)
        ids = torch.randint(VOCAB, (sets, batch), dtype=torch.int32).to(device)
        out = torch.empty(batch, HIDDEN, device=device, dtype=BFLOAT16)

        def call(i: int) -> Call:
            return lambda: embed(weight, ids[i], out)

        return [call(i) for i in range(sets)]

    yield Bench("add and norm", batch, batch * 4 * HIDDEN * 2, build_norm)
    yield Bench("swiglu", batch, batch * 3 * FFN * 2, build_swiglu)
    yield Bench("embedding", batch, batch * 2 * HIDDEN * 2, build_embed)

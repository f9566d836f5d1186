"""Checks and timings of what stands between mixers: products of few rows, norms, swiglu, embedding.

Products are timed beside torch's own (``torch`` in the note), which serves from 17 rows on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import BATCHES, Bench, Call, Check
from hyradix.kernels.activation import reference as swiglu_reference
from hyradix.kernels.activation.triton import swiglu
from hyradix.kernels.embedding.triton import embed
from hyradix.kernels.linear.triton import few_rows_linear
from hyradix.kernels.rms_norm import reference
from hyradix.kernels.rms_norm.triton import add_rms_norm, gated_rms_norm
from hyradix.kernels.triton_table import LinearConfig
from tests.kernels.triton_kernels.cases import NAN, error

BFLOAT16 = torch.bfloat16
HIDDEN, FFN, VOCAB = 2560, 9216, 151_936
EPS = 1e-6


@dataclass(frozen=True)
class Product:
    """Inputs, outputs, and what is fused."""

    name: str
    size: int
    outputs: int
    has_norm: bool = False
    has_residual: bool = False
    is_swiglu: bool = False

    @property
    def weight_rows(self) -> int:
        return self.outputs * (1 + self.is_swiglu)


PRODUCTS = (
    Product("gdn in", HIDDEN, 12_352, has_norm=True),
    Product("attention in", HIDDEN, 10_240, has_norm=True),
    Product("mixer out", 4_096, HIDDEN, has_residual=True),
    Product("gate, up", HIDDEN, FFN, has_norm=True, is_swiglu=True),
    Product("down", FFN, HIDDEN, has_residual=True),
    Product("head", HIDDEN, VOCAB, has_norm=True),
)
ODD = Product("odd", 777, 1_111, has_norm=True, is_swiglu=True)


def checks(device: torch.device) -> Iterator[Check]:
    for product in (*PRODUCTS[:5], ODD):
        for batch in (1, 5, 16):
            x, weight, norm, residual = _inputs(product, batch, device)
            out = torch.full_like(residual, NAN)
            _call(product, x, weight, norm, residual, out, None)
            yield Check(f"{product.name}, {batch} rows", error(
                out, _expected(product, x, weight, norm, residual)), 1e-2)  # fmt: skip
    yield from _check_elementwise(device)


def _expected(
    product: Product, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    wide = x.double()
    if product.has_norm:
        wide = reference.rms_norm(wide, norm.double(), EPS)
    result = wide @ weight.double().T
    if product.is_swiglu:
        result = swiglu_reference.swiglu(result)
    return result + residual.double() if product.has_residual else result


def _check_elementwise(device: torch.device) -> Iterator[Check]:
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


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    configs: list[LinearConfig | None] = [None]
    if tune:
        shapes = ((16, 256), (16, 512), (32, 256), (64, 128), (64, 256))
        configs += [LinearConfig(o, i, w, 4) for o, i in shapes for w in (2, 4)]
        shapes = ((2, 2048), (4, 512), (4, 1024), (4, 2048), (8, 512), (8, 1024))
        configs += [LinearConfig(o, i, 4, n, False) for o, i in shapes for n in (1, 3)]
    for product in PRODUCTS:
        for batch in (1, 4, 8, 16):
            for config in configs:
                if batch > 1 and config is not None and not config.has_units:
                    continue
                yield _bench_product(product, batch, config, device)
            yield _bench_torch(product, batch, device)
        for batch in BATCHES[2:]:
            yield _bench_torch(product, batch, device)
    for batch in BATCHES:
        yield from _bench_elementwise(batch, device)


def _inputs(
    product: Product, batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=BFLOAT16)

    norm = torch.rand(product.size, device=device) + 0.5
    weight = normal(product.weight_rows, product.size)
    return normal(batch, product.size), weight, norm, normal(batch, product.outputs)


def _call(
    product: Product, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor,
    residual: torch.Tensor, out: torch.Tensor, config: LinearConfig | None,
) -> torch.Tensor:  # fmt: skip
    return few_rows_linear(
        x, weight, out, norm=norm if product.has_norm else None, eps=EPS,
        residual=residual if product.has_residual else None, is_swiglu=product.is_swiglu,
        config=config,
    )  # fmt: skip


def _bytes(product: Product, batch: int) -> int:
    return 2 * (product.weight_rows * product.size + batch * (product.size + product.weight_rows))


def _bench_product(
    product: Product, batch: int, config: LinearConfig | None, device: torch.device
) -> Bench:
    def build(sets: int) -> list[Call]:
        def call() -> Call:
            inputs = _inputs(product, batch, device)
            out = torch.empty_like(inputs[3])
            return lambda: _call(product, *inputs, out, config)

        return [call() for _ in range(sets)]

    name, note = f"product, {product.name}", "" if config is None else str(config)
    return Bench(name, batch, _bytes(product, batch), build, note=note, config=config)


def _bench_torch(product: Product, batch: int, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        def call() -> Call:
            x, weight, _, _ = _inputs(product, batch, device)
            return lambda: F.linear(x, weight)

        return [call() for _ in range(sets)]

    flops = 2 * batch * product.weight_rows * product.size
    name = f"product, {product.name}"
    return Bench(name, batch, _bytes(product, batch), build, flops, "torch, nothing fused")


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

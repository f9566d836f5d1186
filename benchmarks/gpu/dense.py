"""Checks and timings of what stands between mixers: products of few rows, and ``dense_rows.py``.

Products are timed beside torch's own (``torch`` in the note), which serves where rows are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import BATCHES, Bench, Call, Check, Checks
from benchmarks.gpu.dense_rows import BFLOAT16, EPS, FFN, HIDDEN, VOCAB, row_benches, row_checks
from hyradix.kernels.activation import reference as swiglu_reference
from hyradix.kernels.linear.triton import (
    MAX_VECTOR_ROWS,
    NUM_PARTS,
    LinearScratch,
    few_rows_linear,
)
from hyradix.kernels.rms_norm import reference
from hyradix.kernels.triton_support import power_of_two
from hyradix.kernels.triton_table import LinearConfig
from tests.kernels.triton_kernels.cases import NAN, error

FEW = (1, 2, 4, 8, 16, 32, 64)
SHARED_BYTES = 220 << 10
"""Of a program, less what its parts and sums may need."""
UNTUNED = "attention in"
"""As "gdn in" but for a sixth of its outputs."""


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
ODD = (
    Product("odd", 777, 1_111, has_norm=True, is_swiglu=True),
    Product("small", 64, 96, has_norm=True, is_swiglu=True),
    Product("short", 32, 200, has_residual=True),
    Product("narrow", 360, 40, has_residual=True),
)


def checks(device: torch.device) -> Iterator[Checks]:
    """What the table says; then of two shapes some candidates and, last, those with groups
    of warps."""
    for product in (*PRODUCTS[:5], *ODD):
        for batch in (1, 2, 5, 16, 33, 64):
            yield _checks(product, batch, None, device)
    yield Checks("rows", partial(row_checks, device))
    chosen = PRODUCTS[2:4]
    for product in chosen:
        for batch in (1, 4, 8):
            for config in _candidates(product, batch)[:3]:
                yield _checks(product, batch, config, device)
    for product in chosen:
        for batch in (8, 16, 33, 64):
            for config in _with_groups(product, batch)[:3]:
                yield _checks(product, batch, config, device)


def _checks(
    product: Product, batch: int, config: LinearConfig | None, device: torch.device
) -> Checks:
    name = f"{product.name}, {batch} rows, {config or 'table'}"
    return Checks(name, partial(_check, name, product, batch, config, device))


def _check(
    name: str, product: Product, batch: int, config: LinearConfig | None, device: torch.device
) -> Iterator[Check]:
    x, weight, norm, residual = _inputs(product, batch, device)
    out, scratch = torch.full_like(residual, NAN), LinearScratch(NUM_PARTS, device)
    _call(product, x, weight, norm, residual, out, config, scratch)
    expected = _expected(product, x, weight, norm, residual)
    yield Check(name, error(out, expected), 1e-2)


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


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    """Candidates with groups of warps come last: a fault in one ends what comes behind it."""
    for product in PRODUCTS:
        for batch in FEW:
            yield _bench_product(product, batch, None, device)
            yield _bench_torch(product, batch, device)
            for config in _candidates(product, batch) if tune else ():
                yield _bench_product(product, batch, config, device)
        yield _bench_torch(product, BATCHES[-1], device)
    yield from row_benches(device, tune=tune)
    for product in PRODUCTS if tune else ():
        for batch in FEW[3:]:
            for config in _with_groups(product, batch):
                yield _bench_product(product, batch, config, device)


def _candidates(product: Product, batch: int) -> list[LinearConfig]:
    """At most twelve."""
    if product.name == UNTUNED:
        return []
    if batch == 1:
        shapes = ((1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4), (8, 4))
        return [_vector(product, o, w) for o, w in shapes]
    splits = 1 if product.outputs >= 8_192 else 4
    units = [LinearConfig(64, 128, 2, stages, splits=splits) for stages in (4, 5)]
    if batch <= MAX_VECTOR_ROWS:
        return [*units, *(_vector(product, 4 // batch * w, w) for w in (1, 2))]
    return units


def _with_groups(product: Product, batch: int) -> list[LinearConfig]:
    """Those whose tiles fit."""
    if product.name == UNTUNED:
        return []
    splits = 1
    if product.is_swiglu:
        sizes = ((128, 128, 3), (128, 64, 5), (128, 64, 6), (256, 64, 4), (256, 64, 3))
    elif product.outputs >= 8_192:
        sizes = ((64, 128, 3), (128, 64, 6), (128, 64, 4), (64, 128, 6), (64, 64, 8))
    else:
        splits, sizes = 3, ((64, 128, 6), (64, 256, 3), (64, 128, 8), (64, 64, 12), (64, 128, 5))
    return [
        LinearConfig(o, i, 4, stages, splits=splits)
        for o, i, stages in sizes
        if 2 * stages * i * (o + power_of_two(batch, least=16)) < SHARED_BYTES
    ]


def _vector(product: Product, block_o: int, warps: int) -> LinearConfig:
    """As many blocks of a row under way as leave a thread registers to add in, no fewer in the
    last turn than before."""
    steps = -(-product.size // (256 * warps))
    turns = -(-steps * block_o // 20)
    blocks = -(-steps // turns)
    return LinearConfig(block_o, 256 * warps, warps, blocks, has_units=False)


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
    scratch: LinearScratch | None = None,
) -> torch.Tensor:  # fmt: skip
    return few_rows_linear(
        x, weight, out, norm=norm if product.has_norm else None, eps=EPS,
        residual=residual if product.has_residual else None, is_swiglu=product.is_swiglu,
        config=config, scratch=scratch,
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
            return lambda: _call(product, *inputs, out, config, scratch)

        scratch = LinearScratch(NUM_PARTS, device)
        return [call() for _ in range(sets)]

    name, note = f"product, {product.name}", "" if config is None else f"{batch} rows, {config}"
    return Bench(name, batch, _bytes(product, batch), build, note=note, config=config)


def _bench_torch(product: Product, batch: int, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        def call() -> Call:
            x, weight, _, _ = _inputs(product, batch, device)
            return lambda: F.linear(x, weight)

        return [call() for _ in range(sets)]

    flops = 2 * batch * product.weight_rows * product.size
    name = f"product, {product.name}"
    return Bench(
        name, batch, _bytes(product, batch), build, flops, "torch, nothing fused", config="torch"
    )

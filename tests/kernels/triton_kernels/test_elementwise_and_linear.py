"""Norms, swiglu, embedding and products with few rows against their torch twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hyradix.kernels.activation import reference as swiglu_reference
from hyradix.kernels.activation.triton import activate
from hyradix.kernels.embedding import reference as embedding_reference
from hyradix.kernels.embedding.triton import embed
from hyradix.kernels.linear.triton import LinearScratch, few_rows_linear
from hyradix.kernels.rms_norm import reference
from hyradix.kernels.rms_norm.triton import add_rms_norm, gated_rms_norm
from hyradix.kernels.triton_support import launch, softplus
from hyradix.kernels.triton_table import LinearConfig
from tests.kernels.triton_kernels.cases import NAN, error

BFLOAT16 = torch.bfloat16


@triton.jit
def _softplus_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, softplus(tl.load(x + i)))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=device)


@pytest.mark.parametrize("size", [33, 64])
def test_norm_behind_a_sum(device, size):
    x, residual = normal(3, size), normal(3, size, seed=1)
    weight = normal(size, seed=2, dtype=torch.float32)
    expected = x.double() + residual.double()
    norm = reference.rms_norm(expected, weight.double(), 1e-6)
    total, out = residual.clone().to(device), poisoned(3, size, device=device)
    add_rms_norm(x.to(device), total, weight.to(device), 1e-6, total, out)
    assert error(total, expected) < 6e-3
    assert error(out, norm) < 6e-3
    alone = poisoned(3, size, device=device)
    add_rms_norm(x.to(device), None, weight.to(device), 1e-6, total, alone)
    assert error(alone, reference.rms_norm(x.double(), weight.double(), 1e-6)) < 6e-3
    assert error(total, expected) < 6e-3


def test_gated_norms(device):
    x, gate = normal(3, 2, 20), normal(3, 2, 20, seed=1)
    weight = normal(2, 20, seed=2, dtype=torch.float32)
    a, z, w = x.double(), gate.double(), weight.double()
    expected = {
        (False, "silu"): reference.gated_rms_norm(a, z, w[1], 1e-6),
        (False, "sigmoid"): reference.rms_norm(a, w[1], 1e-6) * z.sigmoid(),
        (True, "silu"): reference.rms_norm(a * F.silu(z), w, 1e-6),
    }
    for (gate_first, activation), value in expected.items():
        out = poisoned(3, 2, 20, device=device)
        gated_rms_norm(
            x.to(device),
            gate.to(device),
            (weight if gate_first else weight[1]).to(device),
            1e-6,
            out,
            gate_first=gate_first,
            activation=activation,
        )
        assert error(out, value) < 6e-3


def test_activations_and_embedding(device):
    for kind, width in (("swiglu", 2 * 1100), ("relu2", 1100)):
        x = normal(3, width)
        out = poisoned(3, 1100, device=device)
        expected = swiglu_reference.activate(x.double(), kind)
        assert error(activate(x.to(device), kind, out), expected) < 6e-3
    weight, ids = normal(7, 1030), torch.tensor([6, 0, 3], dtype=torch.int32)
    rows = poisoned(3, 1030, device=device, dtype=torch.float32)
    embed(weight.to(device), ids.to(device), rows)
    assert torch.equal(rows.cpu(), embedding_reference.embed(weight, ids).float())


UNITS = LinearConfig(32, 32, 4, 2)
VECTOR = LinearConfig(4, 32, 4, 2, has_units=False)
NARROW = LinearConfig(2, 16, 2, 3, has_units=False)
SHAPES = [
    (1, 64, 32, UNITS), (3, 41, 19, UNITS), (9, 40, 50, UNITS), (16, 96, 50, UNITS),
    (33, 264, 70, LinearConfig(64, 64, 4, 3)), (64, 136, 130, LinearConfig(128, 64, 4, 4)),
    (1, 41, 19, VECTOR), (1, 128, 5, NARROW), (2, 41, 19, NARROW), (3, 72, 6, VECTOR),
    (4, 32, 8, NARROW),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "size", "outputs", "config"), SHAPES)
def test_products_with_what_is_fused(device, rows, size, outputs, config):
    # the interpreter multiplies the bits of bfloat16 operands as integers
    dtype, limit = (torch.float32, 1e-5) if device.type == "cpu" else (BFLOAT16, 1e-2)
    x, weight = normal(rows, size, dtype=dtype), normal(2 * outputs, size, seed=1, dtype=dtype)
    norm = normal(size, seed=2, dtype=torch.float32)
    residual = normal(rows, outputs, seed=3, dtype=dtype)
    a, w = x.double(), weight.double()
    normed = reference.rms_norm(a, norm.double(), 1e-6)
    given = x.to(device), weight.to(device)
    half = given[1][:outputs]
    out = poisoned(rows, outputs, device=device, dtype=dtype)
    few_rows_linear(given[0], half, out, config=config)
    assert error(out, a @ w[:outputs].T) < limit
    out = residual.clone().to(device)
    few_rows_linear(given[0], half, out, residual=out, config=config)
    assert error(out, a @ w[:outputs].T + residual.double()) < limit
    out = poisoned(rows, outputs, device=device, dtype=dtype)
    few_rows_linear(*given, out, norm=norm.to(device), eps=1e-6, is_swiglu=True, config=config)
    assert error(out, swiglu_reference.swiglu(normed @ w.T)) < limit


@pytest.mark.parametrize(("rows", "size", "splits"), [(2, 128, 4), (16, 200, 3), (5, 161, 9)])
def test_products_whose_inputs_are_split(device, rows, size, splits):
    """Counters are 0 again, whatever the number of splits; parts are where nobody else writes."""
    dtype, limit = (torch.float32, 1e-5) if device.type == "cpu" else (BFLOAT16, 1e-2)
    config, scratch = LinearConfig(16, 16, 4, 2, splits=splits), LinearScratch(1 << 14, device)
    scratch.parts.fill_(NAN)
    x, weight = normal(rows, size, dtype=dtype), normal(50, size, seed=1, dtype=dtype)
    residual = normal(rows, 50, seed=3, dtype=dtype)
    expected = x.double() @ weight.double().T + residual.double()
    for _ in range(2):
        out = residual.clone().to(device)
        few_rows_linear(
            x.to(device), weight.to(device), out, residual=out, config=config, scratch=scratch
        )
        assert error(out, expected) < limit
        assert not scratch.counters.any()
    assert not scratch.parts[: splits * 64 * 8].isnan().all()


@pytest.mark.parametrize("config", [UNITS, VECTOR, LinearConfig(16, 16, 4, 2, splits=3)])
def test_a_row_does_not_depend_on_the_others(device, config):
    x, weight = normal(4, 96, dtype=torch.float32), normal(20, 96, seed=1, dtype=torch.float32)
    if device.type != "cpu":
        x, weight = x.to(BFLOAT16), weight.to(BFLOAT16)
    scratch, found = LinearScratch(1 << 14, device), []
    for others in (1.0, NAN):
        rows = x.clone()
        rows[[0, 1, 3]] *= others
        out = torch.empty(4, 20, dtype=x.dtype, device=device)
        few_rows_linear(rows.to(device), weight.to(device), out, config=config, scratch=scratch)
        found.append(out[2].cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 8])
def test_chained_products(device, rows):
    """Each reads what the one before wrote, into memory that the one before that had read."""
    dtype = torch.float32 if device.type == "cpu" else BFLOAT16
    weights = [normal(256, 256, seed=i, dtype=dtype).to(device) / 16 for i in range(6)]
    norm, scratch = torch.ones(256, device=device), LinearScratch(1 << 16, device)
    found = []
    config = LinearConfig(64, 64, 2, 3, splits=2)
    if rows == 1:
        config = LinearConfig(4, 256, 1, 1, has_units=False)
    for is_alone in (False, True):
        x = normal(rows, 256, seed=9, dtype=dtype).to(device)
        pair = [x, torch.empty_like(x)]
        for i, weight in enumerate(weights):
            given, out = pair[i % 2], pair[1 - i % 2]
            factor = norm if i % 3 else None
            few_rows_linear(
                given, weight, out, norm=factor, eps=1e-6, config=config, scratch=scratch
            )
            if is_alone and device.type == "cuda":
                torch.cuda.synchronize()
        found.append(pair[0].cpu())
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_small_softplus_keeps_its_digits(device):
    x = torch.linspace(-40, 40, 256)
    out = torch.empty(256, device=device)
    launch(_softplus_kernel, (1,), x.to(device), out, 256)
    expected = x.double().exp().log1p()
    assert float(((out.cpu().double() - expected) / expected).abs().max()) < 1e-5

"""Products with their prologues, norms, exp32: compiled against torch."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from hyradix.errors import ConfigError
from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.numba_support import compiled, exp32
from hyradix.kernels.ops import load_ops
from hyradix.kernels.torch_ops import TorchOps
from tests.support.marks import needs_tiles

ROWS = [1, 2, 3, 5, 8, 13, 32, 33, 70]


@pytest.fixture(scope="module")
def backends():
    return CompiledOps(), TorchOps()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "outputs"), [(48, 100), (37, 5), (7, 24), (400, 49)])
def test_products(backends, rows, dtype, size, outputs):
    torch.manual_seed(rows)
    weight = torch.randn(outputs, size).to(dtype)
    x, gate_up, residual = (torch.randn(rows, n) for n in (size, 2 * size, outputs))
    norm = torch.randn(size)
    results = []
    for ops in backends:
        packed = ops.pack_linear(weight)
        a, b, r = (ops.view(t) for t in (x, gate_up, residual))
        results.append(
            [
                ops.tensor(ops.norm_linear(a, ops.pack_norm(norm, 1e-6), packed)),
                ops.tensor(ops.linear_add(a, packed, r)),
                ops.tensor(ops.linear_add(ops.activate(b, "swiglu"), packed, r)),
            ]
        )
    tolerance = 1e-4 if dtype == torch.float32 else 0.02 * size**0.5
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=tolerance)


def test_logits_where_they_are_wanted(backends):
    weight, x, out = torch.randn(20, 12), torch.randn(3, 12), torch.full((4, 20), torch.nan)
    for ops in backends:
        given = ops.view(x), ops.pack_norm(torch.ones(12), 1e-6), ops.pack_linear(weight)
        assert ops.logits(*given, out=out[:3]).data_ptr() == out.data_ptr()
        assert torch.equal(out[:3], ops.logits(*given))
        assert out[3].isnan().all()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_activations(backends, activation):
    x = torch.randn(7, 90)
    kept = x.clone()
    ours, twin = (ops.tensor(ops.activate(ops.view(x), activation)) for ops in backends)
    assert torch.allclose(ours, twin, atol=1e-6)
    assert torch.equal(x, kept)


@needs_tiles
def test_a_row_has_the_same_bits_in_any_batch(backends):
    ops, _ = backends
    torch.manual_seed(0)
    packed = ops.pack_linear(torch.randn(100, 57))
    x, residual = torch.randn(32, 57), torch.randn(32, 100)
    whole = ops.linear_add(x.numpy(), packed, residual.numpy())
    for first, last in ((0, 1), (3, 5), (7, 14), (0, 31)):
        part = ops.linear_add(x[first:last].numpy(), packed, residual[first:last].numpy())
        assert np.array_equal(part, whole[first:last])


@compiled()
def exp_of(x, out):
    for i in range(x.size):
        out[i] = exp32(x[i])


def test_exp32():
    x = np.linspace(-86, 87, 10_001).astype(np.float32)
    out = np.empty_like(x)
    exp_of(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    special = np.array([np.nan, -1e9, -np.inf], np.float32)
    out = np.empty_like(special)
    exp_of(special, out)
    assert np.isnan(out[0])
    assert (out[1:] < 1e-37).all()


def test_unknown_backend():
    with pytest.raises(ConfigError, match="compiled"):
        load_ops("cuda-graphs")
    assert load_ops("torch").name == "torch"
    assert load_ops().name == "compiled"


def test_a_directory_that_cannot_be_written_costs_only_the_cache(monkeypatch):
    real = numba.njit

    def no_locator(*args, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", no_locator)
    kernel = compiled()(lambda x: x + x)
    assert kernel(2) == 4

"""Attention over slots: decode, trees, prefill, latent rows; norms, rotation and writes before."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.attention.triton import AttendScratch, attend
from hyradix.kernels.attention.triton_write import write_kv
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.rotary.reference import apply_rotary, rotary_table
from hyradix.kernels.triton_table import AttendConfig
from tests.kernels.triton_kernels.attention_cases import NAN, AttentionCase
from tests.kernels.triton_kernels.cases import error

CASES = {
    "decode": AttentionCase(6, 2, 10, 10, [0, 7, 20], [1, 1, 1]),
    "decode wide": AttentionCase(4, 4, 32, 16, [33, 5], [1, 1]),
    "prefill": AttentionCase(3, 1, 20, 20, [0, 9, 17, 3], [11, 1, 0, 6]),
    "tree": AttentionCase(4, 2, 16, 16, [3, 0], [5, 3], parents=[[-1, 0, 0, 2, 1], [-1, 0, 1]]),
    "latent": AttentionCase(8, 1, 288, 256, [18, 2], [1, 1], is_latent=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_equals_the_definition(device, name, splits):
    case, config = CASES[name], AttendConfig(16, 8 if device.type == "cpu" else 16, splits, 4, 2)
    scratch = AttendScratch(64, case.heads, case.v_dim, device)
    scratch.o.fill_(NAN)
    k = case.k.to(device)
    v = k[..., : case.v_dim] if case.is_latent else case.v.to(device)
    for gate in (None, case.gate.to(device)):
        out = torch.full((sum(case.counts), case.heads * case.v_dim), NAN, device=device)
        attend(
            case.q.to(device), case.queries(config, device), k, v, 0.2, config, scratch, out,
            gate=gate, is_view=case.is_latent,
        )  # fmt: skip
        assert error(out, case.expected(0.2, has_gate=gate is not None)) < 1e-5


def test_a_row_that_sees_nothing_gives_zeros(device):
    case, config = AttentionCase(2, 1, 16, 16, [-1, 4], [1, 1]), AttendConfig(16, 16, 2, 4, 2)
    out = torch.full((2, 32), NAN, device=device)
    attend(
        case.q.to(device), case.queries(config, device), case.k.to(device), case.v.to(device),
        1.0, config, AttendScratch(64, 2, 16, device), out,
    )  # fmt: skip
    assert not out[0].any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 12, 4), (3, 1, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_equals_its_twins(device, heads, kv_heads, dim, rotary, dtype):
    torch.manual_seed(0)
    norms = (torch.randn(dim), torch.randn(dim))
    angles = rotary_table(40, rotary, 10_000.0)
    x = torch.randn(3, 2 * (heads + kv_heads) * dim).to(dtype)
    positions = torch.tensor([0, 39, 7], dtype=torch.int32)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    k, v = (torch.full((6, kv_heads, dim), NAN, dtype=dtype, device=device) for _ in "kv")
    q = torch.full((3, heads, dim), NAN, dtype=dtype, device=device)
    weights = AttentionWeights(
        heads, kv_heads, dim, 1e-6, *(w.to(device) for w in (*norms, angles))
    )
    write_kv(x.to(device), weights, positions.to(device), slots.to(device), q, k, v)
    parts = x.float().split([n * dim for n in (heads, kv_heads, kv_heads, heads)], dim=1)
    turned = [
        apply_rotary(rms_norm(part.unflatten(1, (-1, dim)), norm, 1e-6), angles[positions.long()])
        for part, norm in zip(parts[:2], norms, strict=True)
    ]
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    assert error(q, turned[0]) < limit
    written = torch.tensor([0, 2])
    assert error(k[slots[written].long()], turned[1][written]) < limit
    values = x[:, (heads + kv_heads) * dim : (heads + 2 * kv_heads) * dim]
    assert torch.equal(v[[4, 2]].cpu().flatten(1), values[written])
    assert k[[0, 1, 3, 5]].isnan().all()
    frozen = torch.cat([parts[0], parts[3]], 1).to(device)
    q2 = torch.full((3, heads, dim), NAN, device=device)
    write_kv(frozen, weights, positions.to(device), slots.to(device), q2, None, None)
    assert error(q2, turned[0]) < 1e-6

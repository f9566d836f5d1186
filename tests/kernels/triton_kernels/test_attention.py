"""Attention over slots: decode, trees, prefill, latent rows; norms, rotation and writes before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.device_bytes import GATHERED_KEYS
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.attention.triton import AttendScratch, attend, query_blocks
from hyradix.kernels.attention.triton_gather import (
    KEYS_PER_BLOCK,
    gather,
    gathers,
    key_layout,
)
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


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(3, 1, 20, 20, [0, 9, 17, 70], [11, 1, 0, 6]),
        AttentionCase(4, 2, 16, 16, [40, 0], [37, 30]),
    ],
    ids=["odd heads", "whole blocks"],
)
def test_keys_that_were_copied_give_the_same(device, case, splits):
    config = AttendConfig(16, 8 if device.type == "cpu" else 16, splits, 4, 2)
    queries, total = case.queries(config, device), sum(case.counts)
    keys, room = case.keys(device)
    k, v = gather(queries, keys, case.k.to(device), case.v.to(device), room)
    scratch = AttendScratch(4 * total, case.heads, case.v_dim, device)
    scratch.o.fill_(NAN)
    out = torch.full((total, case.heads * case.v_dim), NAN, device=device)
    attend(
        case.q.to(device), queries, k, v, 0.2, config, scratch, out, gate=case.gate.to(device),
        places=keys.offsets,
    )  # fmt: skip
    assert error(out, case.expected(0.2, has_gate=True)) < 1e-5


def test_keys_are_copied_by_blocks_where_many_queries_read_them():
    blocks, offsets = key_layout(np.array([KEYS_PER_BLOCK + 1, 0, 3], np.int32))
    assert blocks.tolist() == [[0, 0], [0, KEYS_PER_BLOCK], [2, 0]]
    assert offsets.tolist() == [0, KEYS_PER_BLOCK + 1, KEYS_PER_BLOCK + 1, KEYS_PER_BLOCK + 4]

    def is_copied(counts, num_keys, *, dim=256, itemsize=2):
        return gathers(np.array(counts), np.array(num_keys), 4, dim=dim, itemsize=itemsize)

    assert is_copied([256], [16_000])
    assert not is_copied([224], [16_000])  # 7 blocks of queries read each key
    assert not is_copied([8_192], [GATHERED_KEYS + 1])
    assert not is_copied([300, 1], [300, 20_000])  # most keys are of a row of one token
    assert not is_copied([512], [512], itemsize=4)
    assert not is_copied([512], [512], dim=576)


def test_blocks_that_see_most_come_first():
    blocks = query_blocks(np.array([0, 5, 5, 7], np.int32), np.array([0, 9, 3], np.int32), 2)
    assert blocks.tolist() == [[0, 4], [2, 0], [0, 2], [0, 0]]


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

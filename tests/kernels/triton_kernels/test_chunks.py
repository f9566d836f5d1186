"""The gated delta rule by chunks over a ragged batch against its definition, saves included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.gated_delta_rule.triton import Chunks, ChunkScratch, chunk_table, chunked_
from hyradix.kernels.tree_recurrence.chunked import naive
from hyradix.kernels.tree_recurrence.rules import GDN, Inputs
from tests.kernels.triton_kernels.cases import NAN, error

HK, HV = 1, 2
LENGTHS = [70, 1, 3]
SAVES = {0: [(5, 6), (64, 7)], 2: [(2, 4)]}


def on_device(lengths, saves, slots, device) -> Chunks:
    """saves: by sequence, (count, slot)."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    for i, found in saves.items():
        offsets[i + 1 :] += len(found)
    flat = np.array([pair for i in sorted(saves) for pair in saves[i]], np.int32).reshape(-1, 2)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table, chunk_offsets = chunk_table(cu, offsets, flat[:, 0], flat[:, 1])
    numbers = (table, chunk_offsets, np.array(slots, np.int32))
    return Chunks(*(torch.from_numpy(x).to(device) for x in numbers))


def halves(x: torch.Tensor) -> torch.Tensor:
    """As ``triton_halves.split``."""
    x = x * 4096
    return torch.stack([x.half(), (x - x.half().float()).half()])


def test_chunks_end_at_saves():
    chunks = on_device(LENGTHS, SAVES, [1, 2, 3], torch.device("cpu"))
    expected = [(0, 5, 6), (5, 59, 7), (64, 6, 0), (70, 1, 0), (71, 2, 4), (73, 1, 0)]
    assert chunks.table.tolist() == [list(x) for x in expected]
    assert chunks.offsets.tolist() == [0, 3, 4, 6]


SIZES = [
    (20, 18),
    (128, 128),
    (72, 24),
    (96, 64),
    (128, 24),
    (128, 40),
    (128, 64),
    (128, 96),
    (192, 128),
    (256, 96),
]
"""d_k, d_v. Where tiles are whole products are of warp groups."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dk", "dv"),
    [pytest.param(*x, marks=pytest.mark.slow if i > 2 else ()) for i, x in enumerate(SIZES)],
)
def test_chunked_equals_the_definition(device, dk: int, dv: int, dtype: torch.dtype):
    torch.manual_seed(0)
    total, slots = sum(LENGTHS), [3, 1, 2]
    k = torch.randn(total, HK, dk)
    k[10:30] = k[10]  # keys that repeat
    inputs = {
        "q": torch.randn(total, HK, dk), "k": k / k.norm(dim=-1, keepdim=True),
        "v": torch.randn(total, HV, dv), "g": -torch.rand(total, HV) ** 4 * 5,
        "beta": torch.rand(total, HV),
    }  # fmt: skip
    scratch = ChunkScratch(total, HK, HV, dk, dv, device)
    for name, x in inputs.items():
        there = getattr(scratch, name)
        there.copy_(x if there.dtype == torch.float32 else halves(x))
    out = torch.full((total, HV, dv), NAN, dtype=dtype, device=device)
    state = torch.full((9, HV, dk, dv), NAN)
    state[slots] = torch.randn(3, HV, dk, dv)
    ours = state.clone().to(device)
    chunked_(on_device(LENGTHS, SAVES, slots, device), ours, scratch, out)
    begin = 0
    for i, length in enumerate(LENGTHS):
        own = slice(begin, begin + length)
        q, k, v, g, beta = (x[own].double() for x in inputs.values())
        o, states = naive(GDN, q, Inputs(k, v, g.unsqueeze(2), beta), state[slots[i]].double())
        assert error(out[own], o) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert error(ours[slots[i]], states[-1]) < 1e-5
        for count, slot in SAVES.get(i, []):
            assert error(ours[slot], states[count - 1]) < 1e-5
        begin += length
    assert ours[[0, 5, 8]].isnan().all()

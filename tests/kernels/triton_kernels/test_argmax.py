"""Greedy tokens: ties, faults, odd sizes, and views of what is larger."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.argmax import reference
from hyradix.kernels.argmax.triton import ArgmaxConfig, best_of

INF, NAN = float("inf"), float("nan")


def check(logits: torch.Tensor, config: ArgmaxConfig | None, device: torch.device) -> torch.Tensor:
    rows = len(logits)
    expected = torch.full((2, rows), -9, dtype=torch.int32)
    reference.best_of(logits, expected)
    found = torch.full((2, rows + 3), -9, dtype=torch.int32, device=device)
    best_of(logits.to(device), found[:, :rows], config=config)
    assert torch.equal(found[:, :rows].cpu(), expected)
    assert (found[:, rows:] == -9).all()
    return expected


@pytest.mark.parametrize("size", [1, 2, 33, 500])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_first_of_the_largest(device, rows, size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=generator)
    for config in (None, ArgmaxConfig(32, 1)):
        check(logits, config, device)
        check((2 * logits).round(), config, device)  # many equals
        check(torch.zeros(rows, size), config, device)
        check(torch.full((rows, size), -3e38), config, device)


def test_faults(device):
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1))
    logits[0, 299] = NAN
    logits[1, 0] = INF
    logits[2, :] = -INF
    logits[3, 17] = -INF
    logits[4, :200] = -INF
    logits[5, :] = NAN
    logits[6, 3], logits[6, 250] = NAN, INF
    logits[7, 1:] = -INF
    for config in (None, ArgmaxConfig(64, 2)):
        expected = check(logits, config, device)
    assert expected[1].tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0]


def test_rows_of_a_wider_matrix_and_no_rows(device):
    wide = torch.randn(4, 120, generator=torch.Generator().manual_seed(2)).to(device)
    out = torch.full((2, 4), -9, dtype=torch.int32, device=device)
    best_of(wide[:, :70], out)
    assert out[0].tolist() == wide[:, :70].argmax(1).tolist()
    best_of(wide[:0], out[:, :0])

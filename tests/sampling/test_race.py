"""The random stream and the draw: pinned, distributed as they should, and hard to turn over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.sampling.race import (
    BLOCK,
    device_clocks,
    draw_on_device,
    draw_on_host,
    first_to_arrive,
    host_clocks,
    keys,
)

PINNED_KEYS = [4753622219199239, 8202065318212272, 2626884785136340, 6816934478959744]
PINNED_CLOCKS = [0.5241429825136916, 0.6487080298692134, 4.251893362317495, 0.36276565946333766]
CHI_SQUARE_99 = 149
"""Of 99 degrees of freedom, 1 in 1000."""


def make_keys(count: int, seed: int = 3) -> torch.Tensor:
    return torch.from_numpy(keys(np.full(count, seed), np.arange(count)))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_stream_is_pinned() -> None:
    # A change here changes every seeded output that users have recorded.
    got = keys(np.array([0, 1, -1, 2**62]), np.array([0, 5, 5, 100_000]))
    assert got.tolist() == PINNED_KEYS
    found = host_clocks(got, np.array([0, -1, 7, 151_935]))
    assert found.tolist() == pytest.approx(PINNED_CLOCKS, rel=1e-14)


def test_keys_are_uniform_over_positions_and_seeds() -> None:
    for seeds, positions in (
        (np.full(20_000, 3), np.arange(20_000)),
        (np.arange(20_000), np.full(20_000, 3)),
    ):
        drawn = keys(seeds, positions)
        assert ((drawn >= 0) & (drawn < 2**53)).all()
        counts = np.histogram(drawn, bins=100, range=(0, 2**53))[0]
        assert chi_square(counts, np.full(100, 200)) < CHI_SQUARE_99


@pytest.mark.parametrize("of", ["indices", "blocks", "positions", "neighbours"])
def test_clocks_are_exponential(of: str) -> None:
    numbers, key = np.arange(20_000), make_keys(20_000).numpy()
    if of in ("indices", "blocks"):
        found = host_clocks(key[:1], numbers if of == "indices" else -1 - numbers)
    else:  # neighbours: the least of two, twice
        found = host_clocks(key, np.array([5]))
        if of == "neighbours":
            found = 2 * np.minimum(found, host_clocks(key, np.array([6])))
    assert (found > 0).all()
    counts = np.histogram(np.exp(-found), bins=100, range=(0, 1))[0]
    assert chi_square(counts, np.full(100, 200)) < CHI_SQUARE_99


@pytest.mark.parametrize("num_indices", [2, BLOCK, BLOCK + 1, 5 * BLOCK - 3])
def test_the_weights_are_the_distribution(num_indices: int) -> None:
    generator = torch.Generator().manual_seed(num_indices)
    weights = torch.rand(num_indices, generator=generator, dtype=torch.float64) ** 4
    weights[1::7] = 0.0
    drawn = first_to_arrive(weights.expand(40_000, -1), make_keys(40_000)).numpy()
    expected = 40_000 * (weights / weights.sum()).numpy()
    counts = np.bincount(drawn, minlength=num_indices)
    assert (counts[expected == 0] == 0).all()
    is_likely = expected > 20
    degrees = int(is_likely.sum())
    limit = degrees + 3.5 * (2 * degrees) ** 0.5 + 8
    assert chi_square(counts[is_likely], expected[is_likely]) < limit


def test_rounding_turns_no_draw_over() -> None:
    """As float32 rounds, over as many tokens as vocabularies have: with one number against an
    inverse CDF 4 of these 4,000 draws went elsewhere."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, 32_000, generator=generator, dtype=torch.float64)
    num_draws, turned = 4_000, 0
    for first in range(0, num_draws, 500):
        key = make_keys(num_draws)[first : first + 500]
        noise = 2e-6 * torch.randn(500, 32_000, generator=generator, dtype=torch.float64)
        weights = (logits - logits.max()).exp()
        expected = first_to_arrive(weights.expand(500, -1), key)
        turned += int((first_to_arrive(weights * noise.exp(), key) != expected).sum())
    assert turned <= 1


def test_a_row_is_drawn_alone() -> None:
    weights = torch.rand(7, 1000, dtype=torch.float64)
    key = make_keys(7)
    drawn = first_to_arrive(weights, key)
    for row in range(7):
        alone = first_to_arrive(weights[row : row + 1], key[row : row + 1])
        assert alone[0] == drawn[row]


def test_a_row_of_nan_gives_some_index() -> None:
    weights = torch.full((2, 130), torch.nan, dtype=torch.float64)
    assert ((found := first_to_arrive(weights, make_keys(2))) >= 0).all()
    assert (found < 130).all()


def test_a_device_draws_what_the_host_draws() -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.rand(300, BLOCK, 9, dtype=torch.float64, generator=generator) ** 8
    key = torch.from_numpy(keys(np.arange(300) - 150, np.arange(300)))
    index = torch.arange(-40, 40)
    theirs = device_clocks(key[:, None], index).numpy()
    ours = host_clocks(key.numpy()[:, None], index.numpy())
    np.testing.assert_allclose(theirs, ours, rtol=1e-14)
    drawn = draw_on_device(blocks, key)
    assert drawn.tolist() == draw_on_host(blocks.numpy(), key.numpy()).tolist()
    assert (drawn >= BLOCK).any()

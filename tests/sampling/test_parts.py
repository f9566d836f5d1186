"""The random stream, the canonical order and the token counts, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.sampling.adjusting import TokenCounts
from hyradix.sampling.ordering import largest
from hyradix.sampling.uniform import uniforms


def test_uniforms_are_pinned() -> None:
    # A change here changes every seeded output that users have recorded.
    got = uniforms(np.array([0, 1, -1, 2**62]), np.array([0, 5, 5, 100_000]))
    assert got.tolist() == PINNED


PINNED = [0.5277580838124728, 0.9106121765758726, 0.2916427971495872, 0.7568317615902203]


def test_uniforms_are_uniform_over_positions_and_seeds() -> None:
    for seeds, positions in (
        (np.full(20_000, 3), np.arange(20_000)),
        (np.arange(20_000), np.full(20_000, 3)),
    ):
        drawn = uniforms(seeds, positions)
        assert ((drawn >= 0) & (drawn < 1)).all()
        counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 149  # chi-square, 99 degrees, 1 in 1000


@given(
    values=st.lists(st.integers(-3, 3), min_size=2, max_size=60),
    k=st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_largest_orders_by_value_then_id(values: list[int], k: int) -> None:
    k = min(k, len(values))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    logits = torch.tensor([values, values[::-1]], dtype=torch.float32)
    assert largest(logits, k)[0].tolist() == expected


@given(
    tokens=st.lists(st.integers(0, 200), max_size=300),
    cut=st.integers(0, 300),
    known=st.integers(0, 300),
    counts_prompt=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_counts_grown_equal_counts_built(tokens, cut, known, counts_prompt) -> None:
    cut = min(cut, len(tokens))
    known = max(cut, min(known, len(tokens)))
    array = np.array(tokens, np.int32)
    grown = TokenCounts(array[:known], cut, counts_prompt=counts_prompt)
    for token in tokens[known:]:
        grown.add(token)
    built = TokenCounts(array, cut, counts_prompt=counts_prompt)

    def as_dict(counts: TokenCounts) -> dict[int, float]:
        return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))

    assert as_dict(grown) == as_dict(built)
    assert sum(as_dict(built).values()) == len(tokens) - cut


@pytest.mark.parametrize("k", [1, 4])
def test_largest_ignores_a_plateau_of_minus_infinity(k: int) -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 7] = 1.0
    assert largest(logits, k)[0, 0] == 7

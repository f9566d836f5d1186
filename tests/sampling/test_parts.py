"""The canonical order and the token counts, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.sampling.adjusting import TokenCounts
from hyradix.sampling.ordering import largest


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

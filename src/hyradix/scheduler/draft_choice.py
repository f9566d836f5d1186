"""How deep to draft, and for whom: the choice that makes the most tokens a second.

Owns: the arithmetic of one choice, from acceptance and costs. Does not know: requests, how either
was measured, tokens.

With B rows, k_r drafts for row r and a_rd the chance that its d-th draft is accepted when those
before it were, a round makes B + sum_r sum_{j <= k_r} prod_{d <= j} a_rd tokens. It takes
plain(B) + node * sum k_r + draft * max k + round seconds, the last three only where there is any
draft. The best k for a given rate L of tokens a second: row r drafts j deep as long as that adds
more than L * node * j; the deepest row decides what the proposer takes. A few passes over the
depth find the rate that is best.
Read next: ``drafting.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyradix.spec_config import RoundCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """``RoundCosts`` for one number of rows; seconds."""

    plain: float
    node: float
    draft: float
    round: float


@dataclass(frozen=True, slots=True)
class Choice:
    """depths: ``int64[B]`` drafts for each row, 0: none. rate: expected tokens a second."""

    depths: Ints
    rate: float


def costs_at(costs: RoundCosts, num_rows: int, *, num_drafting: int | None = None) -> StepCosts:
    """Interpolated. ``num_drafting``: rows that the proposer runs, where they are others."""
    drafting = num_rows if num_drafting is None else num_drafting
    rows = costs.rows
    return StepCosts(
        plain=float(np.interp(num_rows, rows, costs.plain)) * max(1.0, num_rows / rows[-1]),
        node=float(np.interp(num_rows, rows, costs.node)),
        draft=float(np.interp(drafting, rows, costs.draft)) * max(1.0, drafting / rows[-1]),
        round=float(np.interp(num_rows, rows, costs.round)),
    )


def choose_chain(acceptance: Floats, max_depths: Ints, costs: StepCosts) -> Choice:
    """The best chains. acceptance: ``[B, K]``, max_depths: ``[B]`` at most K. Cost: O(B K^2)."""
    num_rows, deepest = acceptance.shape
    gains = np.cumprod(acceptance, axis=1)
    is_allowed = np.arange(1, deepest + 1) <= max_depths[:, None]
    gains = np.where(is_allowed, gains, 0.0).cumsum(axis=1)
    gains = np.concatenate([np.zeros((num_rows, 1)), gains], axis=1)  # [B, K+1]
    taken = np.minimum(np.arange(deepest + 1), max_depths[:, None])
    best = Choice(np.zeros(num_rows, np.int64), num_rows / costs.plain)
    for depth in range(1, deepest + 1):
        fixed = costs.plain + costs.round + costs.draft * depth
        rate = best.rate
        for _ in range(2):
            net = gains[:, : depth + 1] - rate * costs.node * taken[:, : depth + 1]
            depths = net.argmax(axis=1)
            tokens = num_rows + gains[np.arange(num_rows), depths].sum()
            found = float(tokens / (fixed + costs.node * depths.sum()))
            rate = max(rate, found)
        if found > best.rate and depths.any():
            best = Choice(depths.astype(np.int64), found)
    return best


def tree_rate(gain: float, num_rows: int, num_nodes: int, depth: int, costs: StepCosts) -> float:
    """Tokens a second of trees of ``num_nodes`` for every row, ``gain`` accepted drafts a row."""
    drafted = costs.round + costs.draft * depth + costs.node * num_rows * (num_nodes - 1)
    return num_rows * (1.0 + gain) / (costs.plain + drafted)

"""How deep to draft, and for whom: the choice that makes the most tokens a second.

Owns: the arithmetic of one choice, from acceptance and costs. Does not know: requests, how either
was measured, tokens.

With B rows, k_r drafts for row r and a_rd the chance that its d-th draft is accepted when those
before it were, a round makes B + sum_r sum_{j <= k_r} prod_{d <= j} a_rd tokens. It takes
plain(B) + node * sum k_r + draft * max k + round seconds, the last three only where there is any
draft. The best k for a given rate L of tokens a second: row r drafts j deep as long as that adds
more than L * node * j; the deepest row decides what the proposer takes.
Read next: ``automatic_drafting.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyradix.spec_config import RoundCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PASSES = 6
"""The rate stands still after two or three."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """``RoundCosts`` for one number of rows; seconds."""

    plain: float
    node: float
    draft: float
    round: float


@dataclass(frozen=True, slots=True)
class Choice:
    """depths: ``int64[B]`` drafts for each row, 0: none. rate: expected tokens a second.

    least: of its speed without drafts, what the row is expected to have that they help least.
    """

    depths: Ints
    rate: float
    least: float = 1.0


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
    """The best chains. acceptance: ``[B, K]``, max_depths: ``[B]`` at most K. Cost: O(B K).

    For a rate L, what a depth is worth is its tokens less L times its seconds; the best L is the
    one for which no choice is worth more than nothing. Each pass takes the best choice for L, and
    its rate is the next L: that only rises, and stands still at the best.
    """
    num_rows, deepest = acceptance.shape
    if num_rows == 1:
        return _choose_one(acceptance[0].tolist(), int(max_depths[0]), costs)
    each = np.arange(deepest + 1)
    gains = np.zeros((num_rows, deepest + 1))
    np.cumsum(np.cumprod(acceptance, axis=1), axis=1, out=gains[:, 1:])
    gains[each > max_depths[:, None]] = -np.inf
    fixed = costs.plain + costs.draft * each + costs.round * (each > 0)
    best = Choice(np.zeros(num_rows, np.int64), num_rows / costs.plain)
    for _ in range(PASSES):
        net = gains - best.rate * costs.node * each
        worth = np.maximum.accumulate(net, axis=1).sum(axis=0) - best.rate * fixed
        depth = int(worth.argmax())
        depths = net[:, : depth + 1].argmax(axis=1)
        accepted = gains[np.arange(num_rows), depths]
        tokens = num_rows + float(accepted.sum())
        deepest_taken = int(depths.max(initial=0))
        rate = tokens / (float(fixed[deepest_taken]) + costs.node * float(depths.sum()))
        if rate <= best.rate:
            break
        least = (1.0 + float(accepted.min())) * costs.plain * rate / tokens
        best = Choice(depths.astype(np.int64), rate, least)
    return best


def _choose_one(chances: list[float], max_depth: int, costs: StepCosts) -> Choice:
    """The same for one row: every depth is tried."""
    best_depth, best, tokens, chance = 0, 1.0 / costs.plain, 1.0, 1.0
    for depth in range(1, max_depth + 1):
        chance *= chances[depth - 1]
        tokens += chance
        rate = tokens / (costs.plain + costs.round + (costs.draft + costs.node) * depth)
        if rate > best:
            best_depth, best = depth, rate
    return Choice(np.array([best_depth], np.int64), best, best * costs.plain)


def tree_rate(gain: float, num_rows: int, num_nodes: int, depth: int, costs: StepCosts) -> float:
    """Tokens a second of trees of ``num_nodes`` for every row, ``gain`` accepted drafts a row."""
    drafted = costs.round + costs.draft * depth + costs.node * num_rows * (num_nodes - 1)
    return num_rows * (1.0 + gain) / (costs.plain + drafted)

"""What each request-table row asks of sampling, as columns: who can be served without the host.

Owns: the controls of all rows in arrays, the split of a step's rows by the work that they need.
Does not know: logits, devices, penalties themselves (``sampler.py`` serves rows that have them).

Invariant: the split depends on parameters and positions alone, never on a token's value, so a step
can be planned before the tokens of the one before it are known.
Read next: ``device_picking.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyradix.request import BoolArray, Int32Array, Int64Array, SamplingParams
from hyradix.sampling.adjusting import RowRules
from hyradix.sampling.race import Float64Array, keys

NARROW = 256
"""Rows with top_k up to this need only their so many largest logits."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """M rows that draw in one way; ``index`` ``int64[M]`` among the step's logits.

    numbers: ``float64[5, M]``: temperature, top_k (0: off), top_p, min_p, key.
    is_narrow: top_k is in 1..``NARROW`` for all. is_open: neither top_k nor top_p is on for any.
    """

    index: Int64Array
    numbers: Float64Array
    is_narrow: bool
    is_open: bool


class RowControls:
    """For the rows of one request table."""

    def __init__(self, max_requests: int) -> None:
        self._numbers = np.zeros((4, max_requests))
        self._seeds = np.zeros(max_requests, np.int64)
        self._is_greedy = np.ones(max_requests, np.bool_)
        self._needs_host = np.zeros(max_requests, np.bool_)
        self._first_free = np.zeros(max_requests, np.int64)
        """The first position at which ``min_tokens`` are behind the row."""

    def init_row(self, row: int, params: SamplingParams, seed: int, num_prompt_tokens: int) -> None:
        """A request enters ``row``."""
        rules = RowRules.of(params, ())
        controls = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
        self._numbers[:, row] = controls
        self._seeds[row] = seed
        self._is_greedy[row] = params.is_greedy
        has_rules = rules.needs_counts or bool(rules.bias_ids)
        self._needs_host[row] = has_rules or params.logprobs is not None
        self._first_free[row] = num_prompt_tokens + params.min_tokens

    def need_host(self, rows: Int32Array, positions: Int64Array) -> bool:
        """Whether any row, sampling for ``positions``, needs more than its logits."""
        return bool((self._needs_host[rows] | (positions < self._first_free[rows])).any())

    def draw(self, rows: Int32Array, positions: Int64Array) -> list[Drawn]:
        """The rows that are not greedy, in up to three groups."""
        index = np.flatnonzero(~self._is_greedy[rows])
        if not len(index):
            return []
        numbers = np.empty((5, len(index)))
        numbers[:4] = self._numbers[:, rows[index]]
        numbers[4] = keys(self._seeds[rows[index]], positions[index])
        _, top_k, top_p, _, _ = numbers
        is_narrow = (top_k > 0) & (top_k <= NARROW)
        is_open = (top_k == 0) & (top_p >= 1)
        is_wide = ~is_narrow & ~is_open
        groups = ((is_narrow, True, False), (is_open, False, True), (is_wide, False, False))
        return [_group(index, numbers, *group) for group in groups if group[0].any()]


def _group(
    index: Int64Array, numbers: Float64Array, chosen: BoolArray, is_narrow: bool, is_open: bool
) -> Drawn:
    return Drawn(index[chosen], np.ascontiguousarray(numbers[:, chosen]), is_narrow, is_open)

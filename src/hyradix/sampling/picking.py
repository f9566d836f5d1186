"""From a row of logits and one uniform number to one token id.

Owns: temperature, ``min_p``, ``top_k``, ``top_p`` (applied in this order) and the inverse CDF.
Does not know: requests, history, where the uniform number comes from.
Invariants: each result depends on its own row's (logits, controls, uniform) alone; the CDF runs
over token ids in ascending order, in float64. Sums are taken with ``cumsum`` (sequential), never
with ``sum``, whose order of additions may change with the number of rows.
Read next: ``sampler.py``; ``tests/sampling/reference_sampler.py`` is the readable twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyradix.request import SamplingParams
from hyradix.sampling.ordering import largest

_WIDTHS = (128, 2048)
"""How many of the largest logits are looked at before all are sorted."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Per-row controls of the distribution, all ``[M]`` on the logits' device."""

    temperature: torch.Tensor  # float64, > 0
    top_k: torch.Tensor  # int64, 0 = off
    top_p: torch.Tensor  # float64, 1 = off
    min_p: torch.Tensor  # float64, 0 = off

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Controls:
        """Collect the controls of several rows, none of them greedy."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=torch.tensor([max(p.top_k, 0) for p in params], device=device),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
        )

    def take(self, index: torch.Tensor) -> Controls:
        """The controls of the rows in ``index``."""
        return Controls(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )


def pick(logits: torch.Tensor, controls: Controls, uniform: torch.Tensor) -> torch.Tensor:
    """Pick one token per row: ``int64[M]``.

    Args:
        logits: ``float32[M, V]``, finite or -inf, at least one finite per row.
        uniform: ``float64[M]`` in [0, 1).

    ``top_k`` keeps exactly k tokens and ``top_p`` the fewest tokens whose probability, among
    those that ``min_p`` and ``top_k`` left, reaches p; of equal logits the lower id is kept.
    ``min_p`` keeps what is at least min_p times as likely as the likeliest token.
    """
    weights = _weights(logits, controls)
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_filtered = (controls.top_k > 0) | (controls.top_p < 1)
    open_rows = (~is_filtered).nonzero().flatten()
    if len(open_rows):
        picked[open_rows] = _invert(weights[open_rows], uniform[open_rows])
    pending = is_filtered.nonzero().flatten()
    num_tokens = logits.shape[-1]
    for width in (*(w for w in _WIDTHS if w < num_tokens), num_tokens):
        if not len(pending):
            break
        ids, is_done = _pick_among(
            width, logits[pending], weights[pending], controls.take(pending), uniform[pending]
        )
        picked[pending[is_done]] = ids[is_done]
        pending = pending[~is_done]
    return picked


def _weights(logits: torch.Tensor, controls: Controls) -> torch.Tensor:
    """Unnormalised probabilities after temperature and min_p, ``float64[M, V]``; the best is 1."""
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= controls.temperature[:, None]
    if bool((controls.min_p > 0).any()):
        scaled.masked_fill_(scaled < controls.min_p.log()[:, None], -torch.inf)
    return scaled.exp_()


def _pick_among(
    width: int,
    logits: torch.Tensor,
    weights: torch.Tensor,
    controls: Controls,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick from the ``width`` largest; also say for which rows these were enough."""
    ids = largest(logits, width)  # [M, width]
    kept = weights.gather(1, ids)
    rank = torch.arange(width, device=logits.device)
    has_top_k = controls.top_k > 0
    kept.masked_fill_(has_top_k[:, None] & (rank >= controls.top_k[:, None]), 0.0)
    cumulative = kept.cumsum(dim=-1)
    total = cumulative[:, -1]
    if width < logits.shape[-1] and not bool(has_top_k.all()):
        total = torch.where(has_top_k, total, _total(weights))
    needed = controls.top_p * total
    has_top_p = controls.top_p < 1
    size = 1 + (cumulative < needed[:, None]).sum(dim=-1)
    kept.masked_fill_(has_top_p[:, None] & (rank >= size[:, None]), 0.0)
    is_done = torch.where(has_top_k, controls.top_k <= width, cumulative[:, -1] >= needed)
    ids, by_id = ids.sort(dim=-1)
    place = _invert(kept.gather(1, by_id), uniform)
    return ids.gather(1, place[:, None]).flatten(), is_done | (width == logits.shape[-1])


def _total(weights: torch.Tensor) -> torch.Tensor:
    return weights.cumsum(dim=-1)[:, -1]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative weight exceeds ``uniform`` of the total."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # The product may round up to the total, which no cumulative weight exceeds.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulative, target[:, None], right=True).flatten()

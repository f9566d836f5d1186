"""From a row of logits and a key to one token id.

Owns: temperature, ``min_p``, ``top_k``, ``top_p``, applied in this order.
Does not know: requests, history, where the key comes from, how one of the tokens left is drawn
(``race.py``).
Invariants: each result depends on its own row's (logits, controls, key) alone. Weights are float64
in id order. Sums are taken with ``cumsum`` (sequential), never with ``sum``, whose order of
additions may change with the number of rows.
Read next: ``sampler.py``; ``tests/sampling/reference_sampler.py`` is the readable twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hyradix.request import SamplingParams
from hyradix.sampling.ordering import largest
from hyradix.sampling.race import first_to_arrive

_WIDTH = 256
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


def pick(logits: torch.Tensor, controls: Controls, key: torch.Tensor) -> torch.Tensor:
    """Pick one token per row: ``int64[M]``.

    Args:
        logits: ``float32[M, V]``, finite or -inf, at least one finite per row.
        key: ``int64[M]``, see ``race.keys``.

    ``top_k`` keeps exactly k tokens and ``top_p`` the fewest tokens whose probability, among
    those that ``min_p`` and ``top_k`` left, reaches p; of equal logits the lower id is kept.
    ``min_p`` keeps what is at least min_p times as likely as the likeliest token.
    """
    weights = _weights(logits, controls)
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_filtered = (controls.top_k > 0) | (controls.top_p < 1)
    open_rows = (~is_filtered).nonzero().flatten()
    if len(open_rows):
        picked[open_rows] = first_to_arrive(weights[open_rows], key[open_rows])
    pending = is_filtered.nonzero().flatten()
    num_tokens = logits.shape[-1]
    if len(pending) and num_tokens > 2 * _WIDTH:
        ids, is_done = _pick_among_largest(
            logits[pending], weights[pending], controls.take(pending), key[pending]
        )
        picked[pending[is_done]] = ids[is_done]
        pending = pending[~is_done]
    if len(pending):
        picked[pending] = _pick_among_all(
            logits[pending], weights[pending], controls.take(pending), key[pending]
        )
    return picked


def _weights(logits: torch.Tensor, controls: Controls) -> torch.Tensor:
    """Unnormalised probabilities after temperature and min_p, ``float64[M, V]``; the best is 1."""
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= controls.temperature[:, None]
    if bool((controls.min_p > 0).any()):
        scaled.masked_fill_(scaled < controls.min_p.log()[:, None], -torch.inf)
    return scaled.exp_()


def _pick_among_largest(
    logits: torch.Tensor, weights: torch.Tensor, controls: Controls, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick from the ``_WIDTH`` largest; also say for which rows these were enough."""
    ids = largest(logits, _WIDTH)  # [M, _WIDTH]
    kept = weights.gather(1, ids)
    size, is_enough = _num_kept(kept, weights, controls)
    rank = torch.arange(_WIDTH, device=logits.device)
    kept.masked_fill_(rank >= size[:, None], 0.0)
    return first_to_arrive(torch.zeros_like(weights).scatter_(1, ids, kept), key), is_enough


def _pick_among_all(
    logits: torch.Tensor, weights: torch.Tensor, controls: Controls, key: torch.Tensor
) -> torch.Tensor:
    """Pick by the value of the last logit kept, and how many equal to it are kept."""
    values = _sorted_values(logits)
    size, _ = _num_kept(_weights(values, controls), weights, controls)
    last = values.gather(1, size[:, None] - 1)
    num_tied = size - (values > last).sum(dim=-1)
    is_tied = logits == last
    is_kept = (logits > last) | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied[:, None]))
    return first_to_arrive(weights.masked_fill(~is_kept, 0.0), key)


def _num_kept(
    descending: torch.Tensor, weights: torch.Tensor, controls: Controls
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the likeliest tokens top_k and top_p keep.

    Args:
        descending: ``float64[M, W]``, the W largest weights, the largest first.
        weights: ``float64[M, V]``, all of them, in id order.

    Returns:
        ``int64[M]`` in 1..W, and whether W were enough to tell (always when W = V).
    """
    width, num_tokens = descending.shape[-1], weights.shape[-1]
    has_top_k, has_top_p = controls.top_k > 0, controls.top_p < 1
    limit = torch.where(has_top_k, controls.top_k, num_tokens)
    cumulative = descending.cumsum(dim=-1)
    total = cumulative.gather(1, limit.clamp(max=width)[:, None] - 1).flatten()
    if not bool(has_top_k.all()):
        total = torch.where(has_top_k, total, weights.cumsum(dim=-1)[:, -1])
    needed = controls.top_p * total
    nucleus = 1 + (cumulative < needed[:, None]).sum(dim=-1)
    size = torch.minimum(limit, torch.where(has_top_p, nucleus, num_tokens))
    is_enough = torch.where(has_top_k, limit, nucleus) <= width
    return size.clamp(max=width), is_enough


def _sorted_values(logits: torch.Tensor) -> torch.Tensor:
    """Each row in descending order."""
    if logits.device.type == "cpu":
        # numpy's vectorised sort of values alone is some 20 times as fast as torch's here.
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, ::-1].copy())
    return logits.sort(dim=-1, descending=True).values

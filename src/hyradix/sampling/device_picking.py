"""Logits to token ids in launches alone: nothing here waits for the device.

Owns: what ``picking.py`` does without a decision on the host: what it decides by looking at
values, the caller has decided by parameters (``Drawn``).
Does not know: requests, rows of a table, where tokens go, the argmax (``kernels/argmax``).

Invariants:
- The same tokens as ``picking.pick`` (its readable twin), ties included: float64 weights, sums by
  ``cumsum``, of equal logits the lower id is kept.
- A row that the argmax found faulty gives token 0.
- Scratch is bounded: ``BLOCK`` rows at a time.
Read next: ``row_controls.py``, ``picking.py``.
"""

from __future__ import annotations

import torch

from hyradix.sampling.race import first_to_arrive
from hyradix.sampling.row_controls import NARROW

BLOCK = 32
"""Rows picked at a time."""


def draw_into(
    logits: torch.Tensor,
    index: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
    *,
    is_narrow: bool,
    is_open: bool,
) -> None:
    """Overwrite ``out[0]`` at ``index`` with what the rows of a ``Drawn`` draw.

    Args: as in ``row_controls.Drawn``, on the device. out: as ``kernels/argmax`` left it.
    """
    for first in range(0, len(index), BLOCK):
        block = index[first : first + BLOCK]
        controls = numbers[:, first : first + BLOCK]
        picked = _pick(logits.index_select(0, block), controls, is_narrow, is_open)
        is_faulty = out[1].index_select(0, block) != 0
        picked = picked.masked_fill_(is_faulty, 0).to(torch.int32)
        out[0].index_copy_(0, block, picked)


def _pick(
    logits: torch.Tensor, numbers: torch.Tensor, is_narrow: bool, is_open: bool
) -> torch.Tensor:
    temperature, _, _, min_p, key = numbers
    best = logits.amax(dim=-1, keepdim=True)
    weights = _weights(logits, best, temperature, min_p)
    if is_open:
        return first_to_arrive(weights, key.long())
    width = min(NARROW, logits.shape[1]) if is_narrow else logits.shape[1]
    if is_narrow:
        values = logits.topk(width, dim=-1).values
    else:
        values = logits.sort(dim=-1, descending=True).values
    descending = _weights(values, best, temperature, min_p)
    size = _num_kept(descending, weights, numbers, is_narrow)
    last = values.gather(1, size[:, None] - 1)
    num_tied = size - (values > last).sum(dim=-1)
    is_tied = logits == last
    is_kept = (logits > last) | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied[:, None]))
    return first_to_arrive(weights.masked_fill_(is_kept.logical_not_(), 0.0), key.long())


def _weights(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Unnormalised probabilities after temperature and min_p, ``float64[M, W]``; the best is 1."""
    scaled = logits.double()
    scaled -= best.double()
    scaled /= temperature[:, None]
    scaled.masked_fill_(scaled < min_p.log()[:, None], -torch.inf)
    return scaled.exp_()


def _num_kept(
    descending: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor, is_narrow: bool
) -> torch.Tensor:
    """How many of the likeliest tokens top_k and top_p keep: ``int64[M]``, at least 1."""
    width = descending.shape[1]
    top_k, top_p = numbers[1].long(), numbers[2]
    limit = top_k.clamp(max=width)
    if not is_narrow:
        limit = torch.where(top_k > 0, limit, width)
    cumulative = descending.cumsum(dim=-1)
    total = cumulative.gather(1, limit[:, None] - 1).flatten()
    if not is_narrow:
        total = torch.where(top_k > 0, total, weights.cumsum(dim=-1)[:, -1])
    nucleus = 1 + (cumulative < (top_p * total)[:, None]).sum(dim=-1)
    return torch.where(top_p < 1, torch.minimum(limit, nucleus), limit)

"""Greedy tokens and their faults, in torch: the readable twin of ``triton.py``."""

from __future__ import annotations

import torch


def best_of(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out ``int32[2, M]``: the argmax of ``float32[M, V]``, or 0 and 1 where it is not finite.

    Of equal logits the lower id. NaN is the largest to argmax: the value at it tells all faults.

    Returns: out.
    """
    best = logits.argmax(dim=-1)
    is_faulty = logits.gather(1, best[:, None]).flatten().isfinite().logical_not_()
    out[0].copy_(best.masked_fill_(is_faulty, 0))
    out[1].copy_(is_faulty)
    return out

"""Whole slots and rows of several tensors at once, in torch: clears, copies, rows to the front.

Owns: what ``move_slots`` and ``move_rows`` mean. Does not know: what the tensors hold.
Read next: ``triton.py`` (one launch for all of them).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def move_slots_(
    tensors: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """tensor[:, targets[j]] = tensor[:, sources[j]], or 0 where the source is negative.

    tensors: ``[L, slots, ...]``, each its own L. sources, targets: ``int[J]``; no slot is both, and
    targets differ; entries with target 0 are padding.
    """
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for tensor in tensors if target else ():
            if source < 0:
                tensor[:, target] = 0
            else:
                tensor[:, target] = tensor[:, source]


def move_rows_(
    tensors: Sequence[tuple[torch.Tensor, int]],
    rows: torch.Tensor,
    sources: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """tensor[:, rows[n], first + firsts[n] + j] = tensor[:, rows[n], first + sources[n, j]] for j
    up to counts[n], one j after the other.

    tensors: (``[L, N+1, M, ...]``, first): where its first row stands. rows (all different),
    firsts, counts: ``int[N]``; row 0 is padding. sources: ``int[N, J]``, ascending, none before its
    target.
    """
    columns = (x.tolist() for x in (rows, sources, firsts, counts))
    for row, source, target, count in zip(*columns, strict=True):
        for j in range(count if row else 0):
            for tensor, first in tensors:
                tensor[:, row, first + target + j] = tensor[:, row, first + source[j]]

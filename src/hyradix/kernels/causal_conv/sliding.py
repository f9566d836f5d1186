"""The windows of a chain without duplicates: columns that all windows share, seen through a view.

Owns: the layout ``[N, C, T+K-2]`` (columns) and its overlapping view ``[N, T, C, K-1]`` (windows):
window t, the state after node t, is columns t .. t+K-2. Does not know: slots, layers.

Invariants:
- Chains only: in a tree two nodes would need different values in one column (``tree.py`` serves
  trees). Neighbours overlap in K-2 columns, so nothing is written through the view, only columns.
- Values are those of dense windows, bit by bit, in (T+K-2) / (T (K-1)) of the elements.
Source: DESIGN section 6.2. Read next: ``hyradix/state_bytes.py`` (what each layout takes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyradix.kernels.memory import ReadOnly
from hyradix.kernels.tree_recurrence.topology import check_chain


def sliding_columns(
    shape: tuple[int, ...],
    parents: Sequence[int],
    *,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> torch.Tensor:
    """Empty columns ``[*shape, T+K-2]`` for chains of T = len(parents); shape is ``(.., C)``.

    Raises: ``ValueError`` for a tree: some node that does not continue the one before it.
    """
    check_chain(parents)
    return torch.empty(*shape, len(parents) + width - 2, dtype=dtype, device=device)


def windows_of(columns: torch.Tensor, *, width: int) -> ReadOnly:
    """All windows of ``[.., C, T+K-2]`` as a view ``[.., T, C, K-1]``; writing to it raises."""
    return ReadOnly(columns.unfold(-1, width - 1, 1).movedim(-2, -3))


def write_columns_(columns: torch.Tensor, window: torch.Tensor, x: torch.Tensor) -> None:
    """Fill ``[.., C, T+K-2]`` from the window before the chain and the chain's own columns.

    window: ``[.., C, K-1]``. x: ``[.., C, T]``.
    """
    num_kept = window.shape[-1] - 1
    columns[..., :num_kept] = window[..., 1:]
    columns[..., num_kept:] = x


def scatter_windows_(
    pool: torch.Tensor, slots: torch.Tensor, windows: torch.Tensor, nodes: torch.Tensor
) -> None:
    """``pool[slots[n]]`` = the window after node ``nodes[n]`` of request n.

    Read by (channel, column): ``windows`` may be the overlapping view or dense.

    Args: pool ``[num_slots, C, K-1]``; slots, nodes ``int64[N]``; windows ``[N, T, C, K-1]``.
    """
    requests = torch.arange(nodes.shape[0], device=nodes.device)[:, None, None]
    channels = torch.arange(pool.shape[1], device=nodes.device)[:, None]
    taps = torch.arange(pool.shape[2], device=nodes.device)
    pool[slots] = windows[requests, nodes[:, None, None], channels, taps]

"""The short convolution over trees: one raw column per token, windows gathered by parent table.

Owns: the columns of a request and which of them a node sees. Does not know: slots, layers, who is
accepted.

Columns ``[N, C, K-1+R+T]``: the base's window (oldest first), then the R columns of the log rows,
then one per node. No column is stored twice, whatever the tree.
Invariant: as in ``reference.py``, a window holds RAW inputs; a node's own column is its last.
Source: DESIGN section 6.2. Read next: ``sliding.py`` (chains).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "none"]


def column_index(
    parents: torch.Tensor, num_log_rows: torch.Tensor, *, num_rows: int, width: int
) -> torch.Tensor:
    """Which K columns each node sees: ``int64[N, T, K]``, oldest first, its own last.

    Args:
        parents: ``int64[N, T]`` (``topology.Tree.parents``); padding sees its own column only.
        num_log_rows: ``int64[N]`` valid rows of ``num_rows`` R. width: K.

    Cost: once a step; all layers share it. ``[..., 1:]`` is the window AFTER the node.
    """
    first_node = width - 1 + num_rows
    num_requests, num_nodes = parents.shape
    device = parents.device
    own = torch.arange(first_node, first_node + num_nodes, device=device).expand_as(parents)
    before_root = (width - 2 + num_log_rows).unsqueeze(1)  # the newest column of base and log
    before_node = torch.where(parents >= 0, parents + first_node, before_root)
    before_node = torch.where(parents < -1, own, before_node)
    before_row = torch.arange(-1, first_node - 1, device=device).clamp(min=0)
    before = torch.cat([before_row.expand(num_requests, -1), before_node], 1)
    taps = [own]
    for _ in range(width - 1):
        taps.append(before.gather(1, taps[-1]))
    return torch.stack(taps[::-1], 2)


def tree_conv(
    columns: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
) -> torch.Tensor:
    """activation(convolution) at every node: ``[N, T, C]``.

    Args: columns ``[N, C, K-1+R+T]``, index as ``column_index`` gives it, weight ``[C, K]``,
    bias ``[C]``. Taps are added from the oldest to the newest: every layout gives the same bits.
    """
    requests = torch.arange(columns.shape[0], device=columns.device).unsqueeze(1)
    y = columns.new_zeros(*index.shape[:2], columns.shape[1])
    for tap in range(index.shape[2]):
        y = y + columns[requests, :, index[..., tap]] * weight[:, tap]
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y


def windows_at(columns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Columns ``index`` ``int64[N, K-1]`` of each request, as windows: copies ``[N, C, K-1]``.

    After node t: ``column_index(..)[n, t, 1:]``. After p log rows (a fold): p .. p+K-2.
    """
    return columns.gather(2, index.unsqueeze(1).expand(-1, columns.shape[1], -1))


def windows_after_rows(columns: torch.Tensor, counts: torch.Tensor, *, width: int) -> torch.Tensor:
    """The windows ``[N, C, K-1]`` of bases folded at ``counts`` ``int64[N]`` rows."""
    index = torch.arange(width - 1, device=columns.device) + counts.unsqueeze(1)
    return windows_at(columns, index)

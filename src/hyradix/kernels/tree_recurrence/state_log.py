"""The log of a sequence: rows appended at acceptance, folded into a base at any position.

Owns: what may be done with rows. Does not know: requests, which rows are committed, pools.

Invariants:
- A fold is the closed formula at a position, exact: no row past it is read.
- u is float32 (or wider) and the products are full precision: a fold of low-precision u drifts.
- Dropping rejected rows is a smaller count; no data moves.
Source: DESIGN section 6.1. Read next: ``../causal_conv/tree.py`` (the window moves with the base).
"""

from __future__ import annotations

import torch

from hyradix.kernels.tree_recurrence.rules import Rows, spread_heads


def append_(
    log: Rows, num_log_rows: torch.Tensor, rows: Rows, counts: torch.Tensor
) -> torch.Tensor:
    """Write the first ``counts`` ``int64[N]`` of ``rows`` behind each log's valid rows.

    Args: log ``[N, R, ..]``, rows ``[N, M, ..]`` (an accepted path: ``Rows.take(paths(..)[0])``).

    Returns: the new ``num_log_rows``. Raises: ``ValueError`` where a log is too short.
    """
    total = num_log_rows + counts
    capacity = log.u.shape[1]
    if bool((total > capacity).any()):
        raise ValueError(f"a log of {capacity} rows cannot hold {int(total.max())}")
    request, row = torch.nonzero(
        torch.arange(rows.u.shape[1], device=counts.device) < counts.unsqueeze(1), as_tuple=True
    )
    to = num_log_rows[request] + row
    for target, source in ((log.k, rows.k), (log.u, rows.u), (log.g, rows.g)):
        target[request, to] = source[request, row].to(target.dtype)
    return total


def folded(base: torch.Tensor, log: Rows, counts: torch.Tensor) -> torch.Tensor:
    """The states ``[N, Hv, K, V]`` after the first ``counts`` ``int64[N]`` rows.

    S = D(G_p) S_0 + sum over j <= p of D(G_p - G_j) k_j u_j^T: one product by head. base, log: not
    written; rows past a count are not read. At count 0 it is the base, bit by bit.
    """
    is_folded = torch.arange(log.u.shape[1], device=base.device) < counts.unsqueeze(1)
    log = log.where(is_folded)
    sums = log.g.double().cumsum(1).transpose(1, 2)  # [N, Hv, R, G]
    whole = log.g.double().sum(1).unsqueeze(2)  # [N, Hv, 1, G]
    k = spread_heads(log.k.to(base.dtype), base.shape[1], dim=2).transpose(1, 2)
    k = k * (whole - sums).to(base.dtype).exp()
    kept = base * whole.squeeze(2).to(base.dtype).exp().unsqueeze(-1)
    return kept + k.transpose(2, 3) @ log.u.transpose(1, 2)


def fold_(
    pool: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    log: Rows,
    counts: torch.Tensor,
) -> None:
    """``pool[targets]`` = the states at ``sources`` after ``counts`` rows each.

    Args: pool ``[num_slots, Hv, K, V]``; sources, targets ``int64[N]``; targets are all different
    (the sink apart), each its own source (in place) or no source at all.

    A track boundary inside the log: first fold up to it into the track slot, then in place.
    """
    states = folded(pool.index_select(0, sources), log, counts)
    pool.index_copy_(0, targets, states)


def drop_first_(x: torch.Tensor, counts: torch.Tensor, *, dim: int = 1) -> None:
    """Move what follows the first ``counts`` ``int64[N]`` rows of ``dim`` to its front, in place.

    After a fold of part of a log: k, u and g (dim 1), and the raw columns of the convolution (their
    dim), whose window thereby moves with the base. The freed rows at the end keep old content.
    """
    size = x.shape[dim]
    index = torch.arange(size, device=x.device) + counts.unsqueeze(1)
    moved = x.movedim(dim, 1)
    requests = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    moved.copy_(moved[requests, index.clamp(max=size - 1)])

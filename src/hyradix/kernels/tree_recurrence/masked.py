"""All nodes at once, without any node state: the chunk (WY) form under the ancestor mask.

Owns: ``verify`` of mode ``log``. Does not know: slots, which nodes will be accepted.

S_i = D(G_i) S_0 + sum over j in path(i) of D(G_i - G_j) k_j u_j^T, where G sums g from the base on
along the path. So (I + A) u = r with A_ij = beta_i sum_d k_i[d] k_j[d] e^(G_i[d] - G_j[d]) over
proper ancestors j, and r_i = beta_i (v_i - (D(G_i) S_0)^T k_i - what the log rows give).

Invariants:
- Ratios e^(G_i - G_j) only, the mask put in before the exponential: no factor exceeds 1.
- G is summed in float64: differences of large float32 sums lose the digits that are needed (g to
  -20 over 79 tokens: relative error 2e-5 where float64 sums give 2e-7).
- A node is solved once, in the sweep of its depth, from ancestors that are final; until then its u
  is 0. (Sweeping all nodes every time gives the same u, but its unfinished values can overflow.)
Source: DESIGN section 6.1; WY form: Yang et al., "Gated Delta Networks", section 3.3.
Read next: ``state_log.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.tree_recurrence.rules import Inputs, Rows, Rule, spread_heads
from hyradix.kernels.tree_recurrence.sequential import where_nodes
from hyradix.kernels.tree_recurrence.topology import Tree


def verify(
    rule: Rule,
    base: torch.Tensor,
    log: Rows,
    num_log_rows: torch.Tensor,
    q: torch.Tensor,
    inputs: Inputs,
    tree: Tree,
) -> tuple[torch.Tensor, Rows]:
    """As ``sequential.verify``, without a buffer; the log rows are ancestors of every node.

    Cost: max_depth products [T, T] x [T, V] by head, two [T, K] x [K, V]; with channel decay
    T (R + T) K exponentials by head.
    """
    num_rows, num_heads = log.u.shape[1], base.shape[1]
    q, inputs = where_nodes(q, inputs, tree)
    is_row = torch.arange(num_rows, device=q.device) < num_log_rows.unsqueeze(1)
    log = log.where(is_row)
    q, k, log_k = (_by_head(x, num_heads) for x in (q, inputs.k, log.k))
    log_g, g = path_sums(log.g, inputs.g, tree)  # [N, Hv, R, G], [N, Hv, T, G]
    is_row = is_row.unsqueeze(1).expand(-1, q.shape[2], -1)
    is_ancestor = torch.cat([is_row, tree.ancestors], 2)  # [N, T, R+T], itself included

    grown = g.exp().to(base.dtype)
    k_base, q_base = (k * grown) @ base, (q * grown) @ base  # [N, Hv, T, V]
    every_k, every_g = torch.cat([log_k, k], 2), torch.cat([log_g, g], 2)
    kk, qk = _products((k, q), every_k, g, every_g, is_ancestor.unsqueeze(1))

    log_u, v = log.u.transpose(1, 2), inputs.v.transpose(1, 2)
    beta = inputs.beta.transpose(1, 2).unsqueeze(-1)  # [N, Hv, T, 1]
    u = beta * v
    if rule.has_delta:
        u = u - beta * (k_base + kk[..., :num_rows] @ log_u)
        u = _solve(beta * kk[..., num_rows:], u, tree)
    o = q_base + qk @ torch.cat([log_u, u], 2)
    return o.transpose(1, 2), Rows(inputs.k, u.transpose(1, 2), inputs.g)


def path_sums(
    log_g: torch.Tensor, g: torch.Tensor, tree: Tree
) -> tuple[torch.Tensor, torch.Tensor]:
    """G of the log rows and of the nodes, float64, heads first: ``[N, Hv, R | T, 1 | K]``.

    log_g, g: as in ``Rows`` and ``Inputs``, zero where there is no row or node.
    """
    of_rows = log_g.double().cumsum(1)
    path = torch.einsum("nij,njhg->nihg", tree.ancestors.double(), g.double())
    whole_log = log_g.double().sum(1, keepdim=True)
    return of_rows.transpose(1, 2), (whole_log + path).transpose(1, 2)


def _products(
    lefts: tuple[torch.Tensor, ...],
    right: torch.Tensor,
    left_g: torch.Tensor,
    right_g: torch.Tensor,
    mask: torch.Tensor,
) -> list[torch.Tensor]:
    """For each left: sum over d of left_i[d] right_j[d] e^(G_i[d] - G_j[d]), 0 outside the mask.

    lefts: ``[N, Hv, T, K]``. right: ``[N, Hv, J, K]``. G: ``[N, Hv, T | J, 1 | K]``.
    mask: ``bool[N, 1, T, J]``. Returns ``[N, Hv, T, J]`` each.
    """

    def ratio(d: int) -> torch.Tensor:
        difference = left_g[..., d].unsqueeze(3) - right_g[..., d].unsqueeze(2)
        return difference.masked_fill(~mask, float("-inf")).to(right.dtype).exp()

    if left_g.shape[3] == 1:
        shared = ratio(0)
        return [(left @ right.transpose(2, 3)) * shared for left in lefts]
    sums = [right.new_zeros(*left.shape[:3], right.shape[2]) for left in lefts]
    for d in range(right.shape[3]):  # one channel at a time: no [T, J, K] in memory
        weighted = right[..., d].unsqueeze(2) * ratio(d)
        for total, left in zip(sums, lefts, strict=True):
            total.addcmul_(left[..., d].unsqueeze(3), weighted)
    return sums


def _solve(system: torch.Tensor, right: torch.Tensor, tree: Tree) -> torch.Tensor:
    """u of (I + A) u = right, A = ``system`` below the diagonal: one sweep per depth.

    system: ``[N, Hv, T, T]``, zero outside the ancestors. Its diagonal, which is not A's, meets a u
    that is still 0.
    """
    depths = tree.depths[:, None, :, None]
    u = right.masked_fill(depths > 0, 0)
    for depth in range(1, tree.max_depth + 1):
        u = torch.where(depths == depth, right - system @ u, u)
    return u


def _by_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[N, T, Hk, K]`` -> ``[N, Hv, T, K]``."""
    return spread_heads(x, num_heads, dim=2).transpose(1, 2)

"""The delta rule with a decay by channel in torch: token by token (the oracle), and by chunks.

Owns: S_t = D(g_t) S_{t-1} + k_t u_t^T, u_t = beta_t (v_t - (D(g_t) S_{t-1})^T k_t), o_t = S_t^T q_t
with D(g) = diag(e^g), g a vector of K. q is already scaled, q and k already normalised.
Does not know: projections, gates, slots.

Invariant: only ratios e^(G_i - G_j) with j <= i are formed (G: sums of g), in float64 before the
exponential: no factor exceeds 1, however strong the decay.
Source: DESIGN section 6.1; Kimi Linear, "Kimi Delta Attention" (chunk form).
Read next: ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 16
"""Tokens solved at once: a chunk holds H CHUNK^2 K ratios."""


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one token after the other, in the dtype of its inputs (float64: the oracle).

    Args:
        q, k, g (log decay): ``[T, H, K]``. v: ``[T, H, V]``. beta: ``[T, H]``.
        initial_state: ``[H, K, V]``.

    Returns: o ``[T, H, V]`` and the states after each token ``[T, H, K, V]``.
    """
    state, outputs, states = initial_state, [], []
    for t in range(q.shape[0]):
        state = state * g[t].exp().unsqueeze(-1)
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    *,
    save_at: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The same for one sequence, ``CHUNK`` tokens at a time; shapes as in ``naive``.

    Returns: o, the final state, and the exact state after each count of tokens in ``save_at``.
    """
    state, outputs = initial_state, []
    saved: dict[int, torch.Tensor] = {}
    for first in range(0, q.shape[0], CHUNK):
        piece = slice(first, min(first + CHUNK, q.shape[0]))
        o, u, total = _chunk(q[piece], k[piece], v[piece], g[piece], beta[piece], state)
        outputs.append(o)
        keys = k[piece].transpose(0, 1)  # [H, c, K]
        for count in save_at:
            if first < count <= piece.stop:
                saved[count] = _state_after(state, keys, u, total, count - first)
        state = _state_after(state, keys, u, total, piece.stop - first)
    return torch.cat(outputs), state, [saved[count] for count in save_at]


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [c, H, V], corrections u [H, c, V], summed log decays float64 [H, c, K]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, c, ...]
    total = g.transpose(0, 1).double().cumsum(1)  # float32 sums would lose digits in differences
    beta = beta.T.unsqueeze(-1)
    size = total.shape[1]
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
    difference = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(above, float("-inf"))
    decayed_keys = k.unsqueeze(1) * difference.to(q.dtype).exp()  # [H, c, c, K]
    grown = total.exp().to(q.dtype)
    system = beta * (decayed_keys @ k.unsqueeze(-1)).squeeze(-1)
    right = beta * (v - (k * grown) @ state)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = (q * grown) @ state + (decayed_keys @ q.unsqueeze(-1)).squeeze(-1) @ u
    return o.transpose(0, 1), u, total


def _state_after(
    state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, total: torch.Tensor, count: int
) -> torch.Tensor:
    """The state after ``count`` tokens of a chunk, from its start state: one small product."""
    last = total[:, count - 1 : count]
    scaled = k[:, :count] * (last - total[:, :count]).to(k.dtype).exp()
    kept = state * last.transpose(1, 2).to(state.dtype).exp()
    return torch.baddbmm(kept, scaled.transpose(1, 2), u[:, :count])

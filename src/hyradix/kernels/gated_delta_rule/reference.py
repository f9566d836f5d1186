"""The gated delta rule in torch: token by token (the oracle), by chunks, and one step by slot.

Owns: S_t = exp(g_t) S_{t-1} + k_t u_t^T, u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),
o_t = S_t^T q_t. q is already scaled, q and k already normalised.
Does not know: projections, gates, slots (``step_`` apart).
Source: the WY form of Yang et al., "Gated Delta Networks", section 3.3.
Read next: ``../gated_delta_net/reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 64


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
        q, k: ``[T, H, K]``. v: ``[T, H, V]``. g (log decay), beta: ``[T, H]``.
        initial_state: ``[H, K, V]``.

    Returns: o ``[T, H, V]`` and the states after each token ``[T, H, K, V]``.
    """
    state, outputs, states = initial_state, [], []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
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
    """Outputs [c, H, V], corrections u [H, c, V], summed log decays float64 [H, c] of one chunk."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, c, ...]
    total = g.T.double().cumsum(1)  # differences of large sums: float32 would lose digits
    beta = beta.T.unsqueeze(-1)
    size = total.shape[1]
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    ratio = (
        (total.unsqueeze(2) - total.unsqueeze(1))
        .masked_fill(above, float("-inf"))
        .exp()
        .to(q.dtype)
    )
    grown = total.exp().unsqueeze(-1).to(q.dtype)
    system = beta * (k @ k.transpose(1, 2)) * ratio
    right = beta * (v - grown * (k @ state))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = grown * (q @ state) + ((q @ k.transpose(1, 2)) * ratio) @ u
    return o.transpose(0, 1), u, total


def _state_after(
    state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, total: torch.Tensor, count: int
) -> torch.Tensor:
    """The state after ``count`` tokens of a chunk, from its start state: one small product."""
    last = total[:, count - 1]
    scaled = k[:, :count] * (last.unsqueeze(1) - total[:, :count]).exp().unsqueeze(-1).to(k.dtype)
    kept = state * last.exp()[:, None, None].to(state.dtype)
    return torch.baddbmm(kept, scaled.transpose(1, 2), u[:, :count])


def step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token of each of N sequences, in place in ``pool`` [num_slots, H, K, V] at ``slots``.

    q, k: ``[N, H, K]``; v: ``[N, H, V]``; g, beta: ``[N, H]``. Returns o ``[N, H, V]``.
    """
    state = pool.index_select(0, slots) * g.exp()[:, :, None, None]
    u = beta.unsqueeze(-1) * (v - (k.unsqueeze(2) @ state).squeeze(2))
    state += k.unsqueeze(3) * u.unsqueeze(2)
    pool.index_copy_(0, slots, state)
    return (q.unsqueeze(2) @ state).squeeze(2)

"""The three recurrences along one sequence: token by token (the oracle), and by chunks.

Owns: S_t = D(g_t) S_{t-1} + k_t u_t^T, o_t = S_t^T q_t, over many tokens at once; u is as the rule
says. Does not know: projections, convolution, gates, norms, slots.

Rules differ in two ways. With delta, u solves a triangular system. A decay by head multiplies
products of heads; one by channel goes into the keys first, and a chunk then holds c^2 K ratios a
head: hence the shorter chunks.

Invariant: only ratios e^(G_i - G_j) with j <= i are formed (G: sums of g), in float64 before the
exponential (differences of large sums): no factor exceeds 1, however strong the decay.
Source: DESIGN section 6.1; the WY form of Yang et al., "Gated Delta Networks", section 3.3; Kimi
Linear, "Kimi Delta Attention" (chunk form). Read next: ``rules.py`` (one token).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyradix.kernels.tree_recurrence.rules import Inputs, Rule, spread_heads

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens solved at once, with decay by head and by channel."""


def naive(
    rule: Rule, q: torch.Tensor, inputs: Inputs, initial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in the dtype of its inputs (float64: the oracle).

    Args: q ``[T, Hk, K]``; inputs of T tokens, no leading N; initial ``[Hv, K, V]``.
    Returns: o ``[T, Hv, V]`` and the states after each token ``[T, Hv, K, V]``.
    """
    state, outputs, states = initial, [], []
    q, k = (spread_heads(x, len(initial), dim=1) for x in (q, inputs.k))
    for t in range(len(q)):
        state = state * inputs.g[t].exp().unsqueeze(-1)
        u = inputs.v[t]
        if rule.has_delta:
            u = u - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], inputs.beta[t][:, None] * u)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def chunked(
    rule: Rule,
    q: torch.Tensor,
    inputs: Inputs,
    initial: torch.Tensor,
    *,
    save_at: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The same, a chunk of tokens at a time.

    save_at: ascending counts of tokens (1: the first). Returns: o, the final state, the exact
    states after each of those counts.
    """
    outputs, saved, state = [], [], initial
    length = CHANNEL_CHUNK if rule.has_channel_decay else CHUNK
    for first in range(0, len(q), length):
        piece = slice(first, min(first + length, len(q)))
        part = Inputs(inputs.k[piece], inputs.v[piece], inputs.g[piece], inputs.beta[piece])
        counts = [at - first for at in save_at if first < at <= piece.stop]
        o, states = _chunk(rule, q[piece], part, state, [*counts, piece.stop - first])
        outputs.append(o)
        saved += states[:-1]
        state = states[-1]
    return torch.cat(outputs), state, saved


def _chunk(
    rule: Rule, q: torch.Tensor, inputs: Inputs, state: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """o ``[c, Hv, V]`` of one chunk, and the states after ``counts`` of its tokens."""
    q, k = (spread_heads(x, len(state), dim=1).transpose(0, 1) for x in (q, inputs.k))
    v, beta = inputs.v.transpose(0, 1), inputs.beta.T.unsqueeze(-1)  # [Hv, c, ...]
    sums = inputs.g.transpose(0, 1).double().cumsum(1)  # [Hv, c, 1 or K]
    size = sums.shape[1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1).unsqueeze(-1)
    difference = (sums.unsqueeze(2) - sums.unsqueeze(1)).masked_fill_(is_later, -torch.inf)
    ratios = _ratios(rule, difference, q.dtype)  # [Hv, c, c, 1 or K]
    from_start = sums.exp().to(q.dtype)
    keys = k.unsqueeze(1) * ratios if rule.has_channel_decay else k
    u = beta * v
    if rule.has_delta:
        system = _products(rule, k, keys, ratios, beta)
        right = beta * (v - _read(rule, k, from_start, state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = _read(rule, q, from_start, state) + _products(rule, q, keys, ratios) @ u
    states = [_state_after(rule, state, k, u, sums, count) for count in counts]
    return o.transpose(0, 1), states


def _ratios(rule: Rule, difference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e^difference; by channel, where there are K times as many, the exponential is in dtype."""
    if rule.has_channel_decay:
        return difference.to(dtype).exp()
    return difference.exp().to(dtype)


def _products(
    rule: Rule,
    x: torch.Tensor,
    keys: torch.Tensor,
    ratios: torch.Tensor,
    scale: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """scale_i x_i^T D(G_i - G_j) k_j: ``[Hv, c, c]``. keys: by channel, decayed ones."""
    if rule.has_channel_decay:
        return scale * (keys @ x.unsqueeze(-1)).squeeze(-1)
    return scale * (x @ keys.transpose(1, 2)) * ratios.squeeze(-1)


def _read(
    rule: Rule, x: torch.Tensor, from_start: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """What x_i reads of the chunk's start state, decayed to token i: ``[Hv, c, V]``."""
    if rule.has_channel_decay:
        return (x * from_start) @ state
    return from_start * (x @ state)


def _state_after(
    rule: Rule,
    state: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    sums: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The state after ``count`` tokens of a chunk, from its start state: one small product."""
    last = sums[:, count - 1 : count]
    k, u = k[:, :count], u[:, :count]
    ratios = _ratios(rule, last - sums[:, :count], k.dtype)
    kept = state * _ratios(rule, last.transpose(1, 2), state.dtype)
    if not rule.has_delta:  # Mamba2: values are the shorter side
        return kept + k.transpose(1, 2) @ (u * ratios)
    return torch.baddbmm(kept, (k * ratios).transpose(1, 2), u)

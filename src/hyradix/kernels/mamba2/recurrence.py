"""The state of Mamba2 in torch: token by token (the oracle), and by chunks.

Owns: S_t = e^(g_t) S_{t-1} + k_t u_t^T with u_t = beta_t v_t, o_t = S_t^T q_t: k is B, q is C, v
is x, beta is dt, g = dt times the head's decay rate.
Does not know: projections, gates, D x, slots.

Invariant: only ratios e^(G_i - G_j) with j <= i are formed (G: sums of g), in float64 before the
exponential: no factor exceeds 1, however strong the decay.
Source: DESIGN section 6.1.
Read next: ``reference.py``, ``../tree_recurrence/rules.py`` (one token).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyradix.kernels.tree_recurrence.rules import MAMBA2, Inputs, read, spread_heads, update

CHUNK = 64


def naive(
    q: torch.Tensor, inputs: Inputs, initial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in the dtype of its inputs (float64: the oracle).

    Args: q ``[T, Hk, K]``; inputs of T tokens, no leading N; initial ``[Hv, K, V]``.
    Returns: o ``[T, Hv, V]`` and the states after each token ``[T, Hv, K, V]``.
    """
    state, outputs, states = initial, [], []
    for t in range(q.shape[0]):
        _, state = update(MAMBA2, state, inputs.k[t], inputs.v[t], inputs.g[t], inputs.beta[t])
        outputs.append(read(state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def chunked(
    q: torch.Tensor, inputs: Inputs, initial: torch.Tensor, *, save_at: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The same, ``CHUNK`` tokens at a time.

    save_at: ascending counts of tokens (1: the first). Returns: o, the final state, the states
    after each of those counts.
    """
    outputs, saved, state = [], [], initial
    waiting = list(save_at)
    for first in range(0, q.shape[0], CHUNK):
        piece = slice(first, min(first + CHUNK, q.shape[0]))
        size = piece.stop - first
        counts = [at - first for at in waiting if at <= piece.stop]
        waiting = waiting[len(counts) :]
        part = Inputs(inputs.k[piece], inputs.v[piece], inputs.g[piece], inputs.beta[piece])
        o, states = _chunk(q[piece], part, state, [*counts, size])
        outputs.append(o)
        saved += states[:-1]
        state = states[-1]
    return torch.cat(outputs), state, saved


def _chunk(
    q: torch.Tensor, inputs: Inputs, state: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """o ``[n, Hv, V]`` of one chunk, and the states after ``counts`` of its tokens."""
    heads, size = state.shape[0], q.shape[0]
    q, k = (spread_heads(x, heads, dim=1).transpose(0, 1) for x in (q, inputs.k))  # [Hv, n, K]
    u = (inputs.beta.unsqueeze(2) * inputs.v).transpose(0, 1)  # [Hv, n, V]
    sums = inputs.g.squeeze(2).double().cumsum(0).T  # [Hv, n]
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    ratios = (sums.unsqueeze(2) - sums.unsqueeze(1)).masked_fill_(is_later, -torch.inf)
    ratios = ratios.exp().to(q.dtype)  # [Hv, n, n]
    from_start = sums.exp().to(q.dtype).unsqueeze(2)  # [Hv, n, 1]
    o = ((q @ k.transpose(1, 2)) * ratios) @ u + from_start * (q @ state)
    states = []
    for count in counts:
        decayed = u[:, :count] * ratios[:, count - 1, :count].unsqueeze(2)
        own = k[:, :count].transpose(1, 2) @ decayed
        states.append(from_start[:, count - 1].unsqueeze(2) * state + own)
    return o.transpose(0, 1), states

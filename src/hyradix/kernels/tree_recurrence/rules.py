"""The three recurrences as one rule with two switches, and the tensors they work on.

Owns: one token's update and read; the shapes of what is held (``Inputs``) and logged (``Rows``).
Does not know: trees, slots, projections, convolution, Mamba2's D x (the mixer adds it).

S <- D(g) S + k u^T, o = S^T q, with D(g) = e^g by head (GDN, Mamba2) or by channel of k (KDA), and
u = beta (v - (D(g) S)^T k) (GDN, KDA) or u = beta v (Mamba2: beta is dt, v is x, k is B, q is C).
q is already scaled; q and k are already normalised where the family does so; g <= 0.

N requests, T tokens, Hk and Hv heads (head h of v reads head h // (Hv/Hk) of q and k), K, V sizes.
Source: DESIGN section 6.1. Read next: ``naive.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rule:
    """has_delta: what k already reads is subtracted. has_channel_decay: g is one number per K."""

    name: str
    has_delta: bool
    has_channel_decay: bool


GDN = Rule("gdn", has_delta=True, has_channel_decay=False)
KDA = Rule("kda", has_delta=True, has_channel_decay=True)
MAMBA2 = Rule("mamba2", has_delta=False, has_channel_decay=False)
RULES = (GDN, KDA, MAMBA2)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What moves a state by T tokens; what ``replay`` holds of the accepted ones.

    k: ``[N, T, Hk, K]``. v: ``[N, T, Hv, V]``. g: ``[N, T, Hv, 1]`` or, with channel decay,
    ``[N, T, Hv, K]``. beta: ``[N, T, Hv]``.
    """

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def take(self, index: torch.Tensor) -> Inputs:
        """Tokens ``index`` ``int64[N, M]`` of each request: copies ``[N, M, ...]``."""
        return Inputs(*(_take(x, index) for x in (self.k, self.v, self.g, self.beta)))

    def where(self, keep: torch.Tensor) -> Inputs:
        """Zeros at tokens where ``keep`` ``bool[N, T]`` is False: they then change no state."""
        return Inputs(*(_where(x, keep) for x in (self.k, self.v, self.g, self.beta)))


@dataclass(frozen=True, slots=True)
class Rows:
    """What a log keeps of R tokens: k as in ``Inputs``, u ``[N, R, Hv, V]``, g as in ``Inputs``."""

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor

    def take(self, index: torch.Tensor) -> Rows:
        """Rows ``index`` ``int64[N, M]`` of each request: copies ``[N, M, ...]``."""
        return Rows(*(_take(x, index) for x in (self.k, self.u, self.g)))

    def where(self, keep: torch.Tensor) -> Rows:
        """Zeros at rows where ``keep`` ``bool[N, R]`` is False: they then change no state."""
        return Rows(*(_where(x, keep) for x in (self.k, self.u, self.g)))


def update(
    rule: Rule,
    state: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. state ``[..., Hv, K, V]``, the others as in ``Inputs`` without N and T.

    Returns: u ``[..., Hv, V]``, the new state.
    """
    decayed = state * decay(g)
    read_out = read(decayed, k) if rule.has_delta else 0
    u = beta.unsqueeze(-1) * (v - read_out)
    return u, decayed + outer(k, u)


def apply_row(
    state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """The state ``[..., Hv, K, V]`` after one logged token: the same for all rules."""
    return state * decay(g) + outer(k, u)


def read(state: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """S^T q: state ``[..., Hv, K, V]``, q ``[..., Hk, K]`` -> ``[..., Hv, V]``."""
    q = spread_heads(q, state.shape[-3], dim=-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def outer(k: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """k u^T: ``[..., Hk, K]``, ``[..., Hv, V]`` -> ``[..., Hv, K, V]``."""
    return spread_heads(k, u.shape[-2], dim=-2).unsqueeze(-1) * u.unsqueeze(-2)


def decay(g: torch.Tensor) -> torch.Tensor:
    """D(g) as a factor of a state ``[..., Hv, K, V]``; g ``[..., Hv, 1 or K]``."""
    return g.exp().unsqueeze(-1)


def spread_heads(x: torch.Tensor, num_heads: int, *, dim: int) -> torch.Tensor:
    """Each head of ``dim`` repeated until there are ``num_heads``, neighbours together."""
    return x.repeat_interleave(num_heads // x.shape[dim], dim=dim)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
    return x[rows, index]


def _where(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    shape = keep.shape + (1,) * (x.ndim - 2)
    return x.masked_fill(~keep.view(shape), 0)

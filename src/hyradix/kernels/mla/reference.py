"""Latent attention over KV slots in torch: one row per token, shared by all heads.

Owns: what a row reads and writes in the pool, both forms of the attention. Without positions: the
part of the keys that other models rotate is kept and used as it is.
Does not know: projections of the hidden state, who owns a slot.

A pool row is c (rank R, normalised), then r (E - R numbers, the shared part of the keys). Head h
has keys [W_uk c, r] and values W_uv c. Absorbed: its query becomes [q_nope W_uk, q_rest] and meets
the rows themselves; the values are taken after the weighing. Expanded: keys and values of every row
are made first, head by head: less work where many queries see the same rows.

Invariants:
- A query reads the slots of the columns that ``queries.py`` says it sees, no others.
- No more than ``MAX_SCORES`` scores are held at a time (or those of one query).
Source: DeepSeek-V2, section 2.1. Read next: ``../attention/queries.py``, ``compiled.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hyradix.kernels.attention.queries import Int32Array, RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import gather, written_slots
from hyradix.kernels.rms_norm.reference import rms_norm

MAX_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Float32 weights of one layer.

    keys: ``[H, nope, R]``, W_uk by head. values: ``[H, V, R]``, W_uv. norm: ``[R]``.
    num_shared: E - R, the numbers of a key that all heads share.
    """

    num_shared: int
    keys: torch.Tensor
    values: torch.Tensor
    norm: torch.Tensor
    eps: float

    @property
    def num_heads(self) -> int:
        """H."""
        return self.keys.shape[0]

    @property
    def rank(self) -> int:
        """R."""
        return self.keys.shape[2]

    @property
    def query_dim(self) -> int:
        """Numbers of one head's query."""
        return self.keys.shape[1] + self.num_shared


def latent_attention(
    projected: torch.Tensor,
    weights: LatentWeights,
    batch: RaggedQueries,
    pool: torch.Tensor,
    wanted: WantedTokens | None = None,
) -> torch.Tensor:
    """Write the tokens' rows, attend.

    Args:
        projected: ``[T, H (nope + E - R) + E]``: q of all heads, then c before its norm, and r.
        pool: ``[slots, 1, E]``.
        wanted: the tokens that attend (all write).

    Returns: ``[T, H V]``, or of M wanted tokens ``[M, H V]``, before the output projection.
    """
    rows = pool.squeeze(1)
    q = projected[:, : weights.num_heads * weights.query_dim].unflatten(1, (weights.num_heads, -1))
    c, r = projected[:, -rows.shape[1] :].split([weights.rank, weights.num_shared], dim=1)
    written, slots = written_slots(batch, q.device)
    fresh = torch.cat([rms_norm(c, weights.norm, weights.eps), r], dim=1)
    rows.index_copy_(0, slots, fresh[written].to(rows.dtype))
    if wanted is not None:
        q, batch = q[torch.from_numpy(wanted.index).to(q.device)], wanted.queries
    out = q.new_empty(q.shape[0], weights.num_heads, weights.values.shape[1])
    for i in range(len(batch.rows) - batch.num_trees):
        tokens, seen, start = batch.row(i)
        out[tokens] = attend_row(q[tokens], seen, start, rows, weights)
    for i in batch.tree_tokens:
        token, seen = int(batch.short_tokens[i]), batch.slots_seen(i)
        out[token] = attend_row(q[token : token + 1], seen, len(seen) - 1, rows, weights)[0]
    flat: torch.Tensor = out.flatten(1)
    return flat


def attend_row(
    q: torch.Tensor, slots: Int32Array, start: int, pool: torch.Tensor, weights: LatentWeights
) -> torch.Tensor:
    """Causal attention of one row's queries ``[n, H, D]`` at positions start.. over its slots.

    pool: ``[slots, E]``. Returns ``[n, H, V]``; whichever form needs fewer products.
    """
    rows = gather(pool, slots[: start + q.shape[0]]).to(q.dtype)
    per_key = rows.shape[1] + weights.rank - q.shape[2] - weights.values.shape[1]
    to_expand = weights.rank * (weights.keys.shape[1] + weights.values.shape[1])
    if q.shape[0] * per_key > to_expand:
        return expanded(q, rows, start, weights)
    return absorbed(q, rows, start, weights)


def absorb(q: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """Queries ``[n, H, D]`` -> ``[n, H, E]``, scaled: they meet pool rows."""
    nope, shared = q.split([weights.keys.shape[1], weights.num_shared], dim=2)
    latent = torch.bmm(nope.transpose(0, 1), weights.keys).transpose(0, 1)
    query: torch.Tensor = torch.cat([latent, shared], dim=2) * weights.query_dim**-0.5
    return query


def values_of(context: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """Weighed latents ``[n, H, R]`` -> ``[n, H, V]``."""
    by_head = torch.bmm(context.transpose(0, 1), weights.values.transpose(1, 2))
    values: torch.Tensor = by_head.transpose(0, 1)
    return values


def absorbed(
    q: torch.Tensor, rows: torch.Tensor, start: int, weights: LatentWeights
) -> torch.Tensor:
    """``attend_row`` over gathered rows ``[L, E]``, all heads in one product."""
    query = absorb(q, weights)
    context = query.new_empty(q.shape[0], weights.num_heads, weights.rank)
    for first, last in _blocks(q.shape[0], weights.num_heads * rows.shape[0]):
        seen = start + last
        scores = (query[first:last].flatten(0, 1) @ rows[:seen].T).unflatten(0, (last - first, -1))
        _hide_later(scores.transpose(0, 1), start + first)
        weighed = scores.flatten(0, 1).softmax(-1) @ rows[:seen, : weights.rank]
        context[first:last] = weighed.unflatten(0, (last - first, -1))
    return values_of(context, weights)


def expanded(
    q: torch.Tensor, rows: torch.Tensor, start: int, weights: LatentWeights
) -> torch.Tensor:
    """The same with keys and values of each head in turn."""
    out = q.new_empty(q.shape[0], weights.num_heads, weights.values.shape[1])
    latent, shared = rows.split([weights.rank, weights.num_shared], dim=1)
    scaled = q * weights.query_dim**-0.5
    for head in range(weights.num_heads):
        k = torch.cat([latent @ weights.keys[head].T, shared], dim=1)
        v = latent @ weights.values[head].T
        for first, last in _blocks(q.shape[0], rows.shape[0]):
            seen = start + last
            scores = scaled[first:last, head] @ k[:seen].T
            _hide_later(scores, start + first)
            out[first:last, head] = scores.softmax(-1) @ v[:seen]
    return out


def _blocks(num_queries: int, scores_each: int) -> Iterator[tuple[int, int]]:
    size = max(1, MAX_SCORES // scores_each)
    for first in range(0, num_queries, size):
        yield first, min(first + size, num_queries)


def _hide_later(scores: torch.Tensor, start: int) -> None:
    """Mask ``[.., n, start + n]`` in place: query i sees keys up to start + i."""
    size = scores.shape[-2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., start:].masked_fill_(hidden, -torch.inf)

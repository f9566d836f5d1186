"""Attention over KV slots in torch: q/k norm, rotary, KV write, causal attention, gate.

Owns: the arithmetic of a row's queries. Does not know: projections, who owns a slot.

Invariants:
- A query reads the slots of the columns that ``queries.py`` says it sees, no others.
- No more than ``QUERY_BLOCK`` queries are masked at a time.
Read next: ``queries.py`` (what a query sees), ``compiled.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hyradix.kernels.attention.queries import Int32Array, RaggedQueries, WantedTokens
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.rotary.reference import apply_rotary

QUERY_BLOCK = 256
FEW_QUERIES = 64
"""Queries that attend without a mask over their prefix."""
FEW_SCORES = 1 << 18
"""Scores of one KV head up to which all heads attend in one product; above, queries go in blocks
of ``FEW_ROWS`` rows (query x head of the group), whose scores stay in a near cache."""
FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """q_norm, k_norm: ``float32[D]`` (1 already added). angles: ``float32[length, 2, R/2]``.

    R is 0 where positions are not known. has_norm False: q and k are multiplied by those weights
    and not normalised. has_gate False: ``projected`` has no gates and nothing is gated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    angles: torch.Tensor
    has_norm: bool = True
    has_gate: bool = True


def attention(
    projected: torch.Tensor,
    weights: AttentionWeights,
    batch: RaggedQueries,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    wanted: WantedTokens | None = None,
) -> torch.Tensor:
    """Write the tokens' K and V, attend, gate.

    Args:
        projected: ``[T, (2 H + 2 Hkv) D]``: q of all heads, k, v, gates of all heads (if any).
        k_pool, v_pool: ``[slots, Hkv, D]``.
        wanted: the tokens that attend (all write).

    Returns: ``[T, H D]``, or of M wanted tokens ``[M, H D]``, before the output projection.
    """
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    gates = [heads] if weights.has_gate else []
    q, k, v, *gate = projected.split([n * dim for n in (heads, kv_heads, kv_heads, *gates)], dim=1)
    angles = weights.angles[torch.from_numpy(batch.positions).to(projected.device, torch.long)]
    q = apply_rotary(_normed(q.unflatten(1, (-1, dim)), weights.q_norm, weights), angles)
    k = apply_rotary(_normed(k.unflatten(1, (-1, dim)), weights.k_norm, weights), angles)
    written, slots = written_slots(batch, q.device)
    k_pool.index_copy_(0, slots, k[written].to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v.unflatten(1, (-1, dim))[written].to(v_pool.dtype))
    if wanted is not None:
        index, batch = torch.from_numpy(wanted.index).to(q.device), wanted.queries
        q, gate = q[index], [x[index] for x in gate]
    out = q.new_empty(q.shape)
    for i in range(len(batch.rows) - batch.num_trees):
        tokens, seen, start = batch.row(i)
        out[tokens] = attend_row(q[tokens], seen, start, k_pool, v_pool)
    _attend_each(q, batch, k_pool, v_pool, batch.tree_tokens, out)
    mixed = out.flatten(1)
    return mixed * gate[0].sigmoid() if gate else mixed


def _normed(x: torch.Tensor, weight: torch.Tensor, weights: AttentionWeights) -> torch.Tensor:
    return rms_norm(x, weight, weights.eps) if weights.has_norm else x * weight


def attend_frozen(
    projected: torch.Tensor,
    weights: AttentionWeights,
    batch: RaggedQueries,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Queries over KV that somebody else wrote: norm, rotary, attention, gate; nothing is written.

    Args:
        projected: ``[T, 2 H D]``: q of all heads, then the gates.
        batch: token by token (no row with more than ``queries.SHORT`` tokens).
        k, v: ``[slots, Hkv, D]``; may be read-only.

    Returns: ``[T, H D]``. Raises: ``ValueError`` where a row is too long.
    """
    check_short(batch)
    q, gate = projected.chunk(2, dim=1)
    angles = weights.angles[torch.from_numpy(batch.positions).to(projected.device, torch.long)]
    q = q.unflatten(1, (-1, weights.head_dim))
    q = apply_rotary(rms_norm(q, weights.q_norm, weights.eps), angles)
    out = q.new_empty(q.shape)
    _attend_each(q, batch, k, v, range(len(batch.short_tokens)), out)
    gated: torch.Tensor = out.flatten(1) * gate.sigmoid()
    return gated


def check_short(batch: RaggedQueries) -> None:
    """Raises ``ValueError`` where some row does not attend token by token."""
    if batch.long_rows:
        raise ValueError("frozen KV is attended to token by token: give each token its own row")


def _attend_each(
    q: torch.Tensor,
    batch: RaggedQueries,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    short: range,
    out: torch.Tensor,
) -> None:
    """The ``short`` tokens (numbers in ``batch.short_tokens``), one after the other."""
    for i in short:
        token, slots = int(batch.short_tokens[i]), batch.slots_seen(i)
        query = q[token : token + 1]
        out[token] = attend_row(query, slots, len(slots) - 1, k_pool, v_pool)[0]


def attend_row(
    q: torch.Tensor, slots: Int32Array, start: int, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> torch.Tensor:
    """Causal attention of one row's queries ``[n, H, D]`` at positions start.. over its slots."""
    length = start + q.shape[0]
    k = gather(k_pool, slots[:length]).to(q.dtype)
    v = gather(v_pool, slots[:length]).to(q.dtype)
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    if q.shape[2] <= FEW_QUERIES and start >= q.shape[2]:
        return _attend_few(q, k.transpose(0, 1), v.transpose(0, 1), start)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)  # [Hkv, G, L, D], no copy
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = q.new_empty(q.shape)
    for first in range(0, q.shape[2], QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, q.shape[2])
        seen = start + last
        last_seen = torch.arange(start + first, seen, device=q.device)
        allowed = torch.arange(seen, device=q.device) <= last_seen.unsqueeze(1)
        out[:, :, first:last] = F.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], attn_mask=allowed
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_few(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """A few queries behind a long prefix: all see the prefix, so only the end needs a mask.

    q: ``[Hkv, G, n, D]``; k, v: ``[Hkv, L, D]``; returns ``[n, H, D]``. Twice as fast as masking
    all of it (a question about a cached document).
    """
    kv_heads, group, n, _ = q.shape
    if group * n * k.shape[1] <= FEW_SCORES:
        out = _attend_block(q, k, v, start)
    else:
        out, size = q.new_empty(q.shape), max(1, FEW_ROWS // group)
        for head in range(kv_heads):
            one = slice(head, head + 1)
            for first in range(0, n, size):
                block, seen = slice(first, first + size), start + min(first + size, n)
                keys, values = k[one, :seen], v[one, :seen]
                out[one, :, block] = _attend_block(q[one, :, block], keys, values, start + first)
    result: torch.Tensor = out.permute(2, 0, 1, 3).flatten(1, 2)
    return result


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """All scores of some heads at once; ``[Hkv, G, n, D]`` as q. Only the end needs a mask."""
    _, group, n, dim = q.shape
    scores = torch.matmul(q.flatten(1, 2) * dim**-0.5, k.transpose(1, 2)).unflatten(1, (group, n))
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., start:].masked_fill_(hidden, -torch.inf)
    out: torch.Tensor = torch.matmul(scores.flatten(1, 2).softmax(-1), v).unflatten(1, (group, n))
    return out


def gather(pool: torch.Tensor, slots: Int32Array) -> torch.Tensor:
    """Rows of ``pool`` by slot: a view where the slots are one ascending run, else a copy."""
    first = int(slots[0])
    if int(slots[-1]) - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return pool[first : first + len(slots)]
    return pool.index_select(0, torch.from_numpy(slots).to(pool.device))


def written_slots(batch: RaggedQueries, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``int64`` numbers of the tokens that have a slot to be written, and those slots."""
    tokens = np.flatnonzero(batch.write_slots)
    slots = batch.write_slots[tokens].astype(np.int64)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(slots).to(device)

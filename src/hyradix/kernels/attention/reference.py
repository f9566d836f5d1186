"""Gated attention over KV slots in torch: q/k norm, rotary, KV write, causal attention, gate.

Owns: what a row reads and writes in the KV pool. Does not know: projections, who owns a slot.

Invariants:
- A row reads only the slots its table row names for positions below the query's own + 1.
- Positions before ``write_from`` are read from the pool, never written.
- No more than ``QUERY_BLOCK`` queries are masked at a time.
Read next: ``compiled.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.rotary.reference import apply_rotary

Int32Array = npt.NDArray[np.int32]
QUERY_BLOCK = 256
SHORT = 8
"""Rows with at most this many new tokens attend token by token."""
FEW_QUERIES = 64
FEW_SCORES = 1 << 18
"""Queries that attend without a mask over their prefix, and group x length they do it up to."""


@dataclass(frozen=True, slots=True)
class RaggedQueries:
    """Which positions of which table rows the tokens are.

    cu_seqlens: ``int32[N+1]``. rows: ``int32[N]`` rows of ``kv_table``. starts: ``int32[N]`` first
    positions. positions: ``int32[T]``. write_slots: ``int32[T]``, 0 where nothing is written.
    kv_table: ``int32[max_requests, max_context]``. The rest splits the tokens, see ``of``:
    long_rows: indices of rows that attend by blocks. short_tokens, short_rows, short_lengths:
    tokens of all other rows, the table row of each and how many keys it sees.
    """

    cu_seqlens: Int32Array
    rows: Int32Array
    starts: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    kv_table: Int32Array
    long_rows: tuple[int, ...]
    short_tokens: Int32Array
    short_rows: Int32Array
    short_lengths: Int32Array

    @classmethod
    def of(
        cls,
        cu_seqlens: Int32Array,
        rows: Int32Array,
        starts: Int32Array,
        positions: Int32Array,
        write_slots: Int32Array,
        kv_table: Int32Array,
    ) -> RaggedQueries:
        """Rows with more than ``SHORT`` tokens attend by blocks, the others token by token."""
        counts = np.diff(cu_seqlens)
        longest = int(counts.max(initial=0))
        long_rows = tuple(np.flatnonzero(counts > SHORT).tolist()) if longest > SHORT else ()
        if longest == 1:  # all decode: the tokens are the rows
            tokens, token_rows = np.arange(len(rows), dtype=np.int32), rows
        else:
            tokens = np.flatnonzero(np.repeat(counts <= SHORT, counts)).astype(np.int32)
            token_rows = np.repeat(rows, counts)[tokens]
        lengths = positions[tokens] + np.int32(1)
        return cls(
            cu_seqlens, rows, starts, positions, write_slots, kv_table,
            long_rows, tokens, token_rows, lengths,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """q_norm, k_norm: ``float32[D]`` (1 already added). angles: ``float32[length, 2, R/2]``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    angles: torch.Tensor


def attention(
    projected: torch.Tensor,
    weights: AttentionWeights,
    batch: RaggedQueries,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> torch.Tensor:
    """Write the tokens' K and V, attend, gate.

    Args:
        projected: ``[T, (2 H + 2 Hkv) D]``: q of all heads, k, v, gates of all heads.
        k_pool, v_pool: ``[slots, Hkv, D]``.

    Returns: ``[T, H D]``, before the output projection.
    """
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    q, k, v, gate = projected.split([n * dim for n in (heads, kv_heads, kv_heads, heads)], dim=1)
    angles = weights.angles[torch.from_numpy(batch.positions).long()]
    q = apply_rotary(rms_norm(q.unflatten(1, (-1, dim)), weights.q_norm, weights.eps), angles)
    k = apply_rotary(rms_norm(k.unflatten(1, (-1, dim)), weights.k_norm, weights.eps), angles)
    written = torch.from_numpy(np.flatnonzero(batch.write_slots))
    slots = torch.from_numpy(batch.write_slots).long()[written]
    k_pool.index_copy_(0, slots, k[written].to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v.unflatten(1, (-1, dim))[written].to(v_pool.dtype))
    out = q.new_empty(q.shape)
    for i in range(len(batch.rows)):
        first, last = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        out[first:last] = attend_row(
            q[first:last], batch.kv_table[batch.rows[i]], int(batch.starts[i]), k_pool, v_pool
        )
    gated: torch.Tensor = out.flatten(1) * gate.sigmoid()
    return gated


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
    if q.shape[2] <= FEW_QUERIES and start >= q.shape[2] and group * length <= FEW_SCORES:
        return _attend_few(q, k.transpose(0, 1), v.transpose(0, 1), start)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)  # [Hkv, G, L, D], no copy
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = q.new_empty(q.shape)
    for first in range(0, q.shape[2], QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, q.shape[2])
        seen = start + last
        allowed = torch.arange(seen) <= torch.arange(start + first, seen).unsqueeze(1)
        out[:, :, first:last] = F.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], attn_mask=allowed
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_few(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """A few queries behind a long prefix: all see the prefix, so only the end needs a mask.

    q: ``[Hkv, G, n, D]``; k, v: ``[Hkv, L, D]``; returns ``[n, H, D]``. Scores are n G L floats a
    head. Twice as fast as masking all of it (a question about a cached document).
    """
    kv_heads, group, n, dim = q.shape
    folded = q.reshape(kv_heads, group * n, dim) * dim**-0.5
    scores = torch.matmul(folded, k.transpose(1, 2)).unflatten(1, (group, n))
    hidden = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores[..., start:].masked_fill_(hidden, -torch.inf)
    out = torch.matmul(scores.flatten(1, 2).softmax(-1), v)
    result: torch.Tensor = out.unflatten(1, (group, n)).permute(2, 0, 1, 3).flatten(1, 2)
    return result


def gather(pool: torch.Tensor, slots: Int32Array) -> torch.Tensor:
    """Rows of ``pool`` by slot: a view where the slots are one ascending run, else a copy."""
    first = int(slots[0])
    if int(slots[-1]) - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return pool[first : first + len(slots)]
    return pool.index_select(0, torch.from_numpy(slots))

"""Attention over KV slots on the GPU: decode, draft trees and prefill behind a cached prefix.

Owns: which rows and keys a program takes, the two masks, the parts of a long row and their sum.
Does not know: who owns a slot, norms and rotation (``triton_write.py``).

A block is some consecutive tokens of one batch row; its query rows are those tokens times the heads
of one KV head, so a key is read once for all of them. Keys are read slot by slot, or in the order
of their columns where they were copied to one place (``triton_gather.py``).

Invariants:
- A token of a row that starts at ``start`` sees columns [first, start) of its table row, and behind
  those, of the row's own tokens, the ones up to itself or (trees) those of its path.
- Columns that nobody may see are not read: sinks and freed slots may hold NaN.
- A row that sees nothing gives zeros.
- Blocks that see most come first: the device is full until the end.
Read next: ``triton_gather.py``; ``reference.py``, ``queries.py`` (the readable twins).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hyradix.kernels.attention.queries import Int32Array
from hyradix.kernels.triton_support import (
    ceil_div,
    divisor,
    launch,
    load32,
    output_precision,
    power_of_two,
    sigmoid,
    store,
    wait_for_previous,
)
from hyradix.kernels.triton_table import AttendConfig

_LOG2_E = 1.4426950408889634
_COMBINED = 2048
"""Numbers that a program adds up at once."""


@dataclass(frozen=True, slots=True)
class DeviceQueries:
    """What each token sees; tensors on the device.

    cu_seqlens: ``int32[N+1]``. rows, starts: ``int32[N]`` table rows, first positions (-1 with one
    token: sees nothing). blocks: ``int32[B, 2]`` (batch row, its first token in the block), see
    ``query_blocks``. ancestors: ``int64[T]`` or None: bit j: the token sees the row's own token j
    (trees, at most 64 tokens a row). kv_table: ``int32[max_requests, max_context]``.
    """

    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor
    kv_table: torch.Tensor
    ancestors: torch.Tensor | None = None
    first: int = 0


class AttendScratch:
    """Parts of outputs, for ``capacity`` (token, split) pairs at most; layers use it in turn."""

    def __init__(self, capacity: int, num_heads: int, v_dim: int, device: torch.device) -> None:
        self.capacity = capacity
        self.o = torch.empty(capacity, num_heads, v_dim, device=device)
        self.lse = torch.empty(capacity, num_heads, device=device)


def tokens_per_block(config: AttendConfig, group: int) -> int:
    """Tokens whose ``group`` heads fit the query rows of one block."""
    assert group <= config.block_m
    return config.block_m // group


def query_blocks(cu_seqlens: Int32Array, starts: Int32Array, tokens: int) -> Int32Array:
    """``DeviceQueries.blocks`` with up to ``tokens`` tokens each, those with most keys first."""
    blocks = cut(np.diff(cu_seqlens), tokens)
    order = np.argsort(-(starts[blocks[:, 0]] + blocks[:, 1]), kind="stable")
    found: Int32Array = blocks[order]
    return found


def cut(counts: Int32Array, size: int) -> Int32Array:
    """``int32[B, 2]``: (row, its first) of blocks of up to ``size``, rows one after the other."""
    blocks = -(-counts // size)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), blocks)
    before = np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = (np.arange(len(row)) - before) * size
    return np.stack([row, first.astype(np.int32)], 1)


def num_programs(counts: Int32Array, group: int, kv_heads: int) -> int:
    """Of rows with so many tokens, at 128 query rows a program, before keys are split."""
    return kv_heads * int(-(-counts * group // 128).sum())


def attend(
    q: torch.Tensor,
    queries: DeviceQueries,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    config: AttendConfig,
    scratch: AttendScratch,
    out: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    is_view: bool = False,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """out ``[T, H Dv]`` of q ``[T, H, D]``, times sigmoid(gate ``[T, H Dv]``) where there is one.

    k_pool: ``[slots, Hkv, D]``. v_pool: ``[slots, Hkv, Dv]``, which may be a view of k_pool (latent
    rows: one KV head, V is the front of K). is_view: it is one, and where both are padded to one
    size (512 + 64 and 512), a row is read once for both. ``queries.blocks`` were made for
    ``config``. places: ``int32[N]`` where each row's first column stands in k_pool and v_pool, the
    others behind it (no trees); None: the table says.
    """
    num_tokens, heads, dim = q.shape
    kv_heads, v_dim = v_pool.shape[1:]
    assert q.stride(2) == k_pool.stride(2) == v_pool.stride(2) == 1
    assert out.stride(1) == 1
    assert gate is None or gate.stride(1) == 1
    whole = power_of_two(dim)
    tail = dim - whole // 2 if dim < whole and dim > 256 else 0  # 576 = 512 + 64
    main = whole // 2 if tail else dim
    assert places is None or (queries.ancestors is None and not tail)
    if is_view:
        assert v_pool.data_ptr() == k_pool.data_ptr()
        assert v_pool.stride() == k_pool.stride()
    block_d, block_v = power_of_two(main, least=16), power_of_two(v_dim, least=16)
    splits = divisor(config.splits, max(scratch.capacity // max(num_tokens, 1), 1))
    launch(
        _attend_kernel,
        (queries.blocks.shape[0] * kv_heads, splits),
        q, *q.stride()[:2], k_pool, *k_pool.stride()[:2], v_pool, *v_pool.stride()[:2],
        queries.kv_table, queries.kv_table.stride(0), queries.blocks, queries.cu_seqlens,
        queries.rows, queries.starts, queries.starts if queries.ancestors is None else
        queries.ancestors, queries.starts if places is None else places, queries.first,
        scale * _LOG2_E, scratch.o, scratch.lse,
        out if gate is None else gate, 0 if gate is None else gate.stride(0), out, out.stride(0),
        num_tokens, splits, heads, kv_heads, main, tail, v_dim, is_view and block_d == block_v,
        queries.ancestors is not None, places is not None, gate is not None,
        tokens_per_block(config, heads // kv_heads), config.block_m, config.block_n, block_d,
        power_of_two(tail, least=16), block_v, splits > 1, output_precision(q.dtype), config.stages,
        num_warps=config.num_warps, num_stages=config.stages, is_chained=True,
    )  # fmt: skip
    if splits > 1:
        combine(scratch, splits, out, gate=gate)
    return out


def combine(
    scratch: AttendScratch, splits: int, out: torch.Tensor, *, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The first ``splits * T`` parts of ``scratch``, by split, as ``out`` of ``attend``."""
    num_tokens, (heads, v_dim) = out.shape[0], scratch.o.shape[1:]
    block_s, block_v = power_of_two(splits), power_of_two(v_dim)
    block_v = min(block_v, max(_COMBINED // block_s, 32))
    launch(
        _combine_kernel,
        (num_tokens, heads, ceil_div(v_dim, block_v)),
        scratch.o, scratch.lse, out if gate is None else gate,
        0 if gate is None else gate.stride(0), out, out.stride(0),
        num_tokens, heads, v_dim, gate is not None, splits, block_s, block_v,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "table_stride"])
def _attend_kernel(
    q, q_token, q_head, k_pool, k_slot, k_head, v_pool, v_slot, v_head, table, table_stride,
    blocks, cu_seqlens, rows, starts, ancestors, places, first, scale, part_o, part_lse,
    gate, gate_stride, out, out_stride, num_tokens, num_splits,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, DV: tl.constexpr,
    IS_VIEW: tl.constexpr, IS_TREE: tl.constexpr, IS_GATHERED: tl.constexpr,
    HAS_GATE: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BDV: tl.constexpr, IS_PART: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Scores are in units of log 2; ``scale`` has the factor."""
    G: tl.constexpr = H // HKV
    block = tl.program_id(0) // HKV
    kv_head = tl.program_id(0) % HKV
    split = tl.program_id(1)
    i = tl.load(blocks + 2 * block)
    first_token = tl.load(blocks + 2 * block + 1)
    begin = tl.load(cu_seqlens + i)
    count = tl.load(cu_seqlens + i + 1) - begin
    start = tl.load(starts + i)
    table += tl.load(rows + i).to(tl.int64) * table_stride

    m = tl.arange(0, BM)
    own = first_token + m // G  # which of the row's own tokens
    is_query = (m // G < TOKENS) & (own < count)
    token = (begin + own).to(tl.int64)
    head = kv_head * G + m % G
    d, t, dv, n = tl.arange(0, BD), tl.arange(0, BT), tl.arange(0, BDV), tl.arange(0, BN)
    wait_for_previous(CHAINED)
    q_place = q + token[:, None] * q_token + head[:, None] * q_head
    queries = tl.load(q_place + d[None, :], mask=is_query[:, None] & (d < D)[None, :], other=0.0)
    if TAIL > 0:
        in_tail = is_query[:, None] & (t < TAIL)[None, :]
        queries_tail = tl.load(q_place + D + t[None, :], mask=in_tail, other=0.0)
    bits = m.to(tl.int64)
    if IS_TREE:
        bits = tl.load(ancestors + token, mask=is_query, other=0)

    end = start + count
    if not IS_TREE:
        end = start + tl.minimum(first_token + TOKENS, count)
    per_split = tl.cdiv(tl.cdiv(end - first, BN), num_splits) * BN
    low = first + split * per_split
    high = tl.minimum(low + per_split, end)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, BDV], tl.float32)
    if IS_GATHERED:  # first whole blocks of columns that every query sees
        place = tl.load(places + i).to(tl.int64) - first
        k_pool += place * k_slot + kv_head * k_head
        v_pool += place * v_slot + kv_head * v_head
        seen_by_all = tl.minimum(start + first_token + 1, high)
        masked_from = low + tl.maximum(seen_by_all - low, 0) // BN * BN
        for c in tl.range(low, masked_from, BN, num_stages=STAGES):
            column = (c + n).to(tl.int64)
            keys = _whole_rows(k_pool, column, k_slot, d, D, BD)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            p, kept, top, total = _weights(score, top, total)
            values = _whole_rows(v_pool, column, v_slot, dv, DV, BDV)
            o = tl.dot(p.to(values.dtype), values, o * kept[:, None], input_precision=PRECISION)
        low = masked_from
    for c in tl.range(low, high, BN, num_stages=STAGES):
        column = c + n
        is_key = column < high
        if IS_GATHERED:
            slot = column.to(tl.int64)
        else:
            slot = tl.load(table + column, mask=is_key, other=0).to(tl.int64)
        k_place = k_pool + slot[:, None] * k_slot
        v_place = v_pool + slot[:, None] * v_slot + dv[None, :]
        if not IS_GATHERED:
            k_place += kv_head * k_head
            v_place += kv_head * v_head
        keys = tl.load(k_place + d[None, :], mask=is_key[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if TAIL > 0:
            is_tail = is_key[:, None] & (t < TAIL)[None, :]
            keys_tail = tl.load(k_place + D + t[None, :], mask=is_tail, other=0.0)
            keys_tail = tl.trans(keys_tail)
            score = tl.dot(queries_tail, keys_tail, score, input_precision=PRECISION)
        behind = (column - start)[None, :]
        if IS_TREE:
            on_path = (bits[:, None] >> tl.maximum(behind, 0).to(tl.int64)) & 1
            is_seen = (behind < 0) | (on_path != 0)
        else:
            is_seen = behind <= own[:, None]
        score = tl.where(is_seen & is_key[None, :], score * scale, float("-inf"))
        p, kept, top, total = _weights(score, top, total)
        if IS_VIEW:
            values = keys
        else:
            values = tl.load(v_place, mask=is_key[:, None] & (dv < DV)[None, :], other=0.0)
        o = tl.dot(p.to(values.dtype), values, o * kept[:, None], input_precision=PRECISION)

    inside = is_query[:, None] & (dv < DV)[None, :]
    place = head[:, None] * DV + dv[None, :]
    if not IS_PART:
        o = o / tl.where(total > 0.0, total, 1.0)[:, None]
        if HAS_GATE:
            o *= sigmoid(load32(gate + token[:, None] * gate_stride + place, inside))
        store(out + token[:, None] * out_stride + place, o, inside)
    else:
        part = split * num_tokens + token
        is_empty = total == 0.0
        lse = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(part_lse + part * H + head, lse, mask=is_query)
        o = o / tl.where(is_empty, 1.0, total)[:, None]
        tl.store(part_o + part[:, None] * (H * DV) + place, o, mask=inside)


@triton.jit
def _weights(score, top, total):
    """Of a block of scores: exponentials, what earlier sums are worth now, the new maximum and
    sum."""
    new_top = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(score - safe[:, None])
    kept = tl.exp2(top - safe)
    return p, kept, new_top, total * kept + tl.sum(p, 1)


@triton.jit
def _whole_rows(pool, column, stride, d, D: tl.constexpr, BD: tl.constexpr):
    """Rows that are all there; without a mask where their numbers are, too."""
    place = pool + column[:, None] * stride + d[None, :]
    if D == BD:
        return tl.load(place)
    else:
        return tl.load(place, mask=(d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    part_o, part_lse, gate, gate_stride, out, out_stride, num_tokens,
    H: tl.constexpr, DV: tl.constexpr, HAS_GATE: tl.constexpr, SPLITS: tl.constexpr,
    BS: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of one token: all parts at once, weighted by their exponentials."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s, dv = tl.arange(0, BS), tl.program_id(2) * BDV + tl.arange(0, BDV)
    in_v = dv < DV
    part = (s * num_tokens + token) * H + head
    is_part = s < SPLITS
    lses = tl.load(part_lse + part, mask=is_part, other=float("-inf"))
    inside = is_part[:, None] & in_v[None, :]
    parts = tl.load(part_o + part[:, None] * DV + dv[None, :], mask=inside, other=0.0)
    top = tl.max(lses, 0)
    weights = tl.exp2(lses - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    o = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    if HAS_GATE:
        o *= sigmoid(load32(gate + token * gate_stride + head * DV + dv, in_v))
    store(out + token * out_stride + head * DV + dv, o, in_v)

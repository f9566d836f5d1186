"""Keys and values of rows that prefill, copied to one place before attention reads them.

A long chunk reads every key once for each of its blocks of queries. Behind a table of slots that is
an address to wait for and one to multiply for every key; in one place it is neither, and attention
takes 0.7 of the time (8,192 tokens of the 4b shape on an H200, the copy included).

Owns: when that pays, the copy. Does not know: attention, who owns a slot.

Invariants:
- Row i's column ``first`` is copied to place ``offsets[i]``, the columns behind it follow.
- The copy is of one layer: it is overwritten by the next, on the same stream.
Read next: ``triton.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hyradix.device_bytes import gathered_keys
from hyradix.kernels.attention.queries import Int32Array
from hyradix.kernels.attention.triton import DeviceQueries, cut
from hyradix.kernels.triton_support import launch, power_of_two, wait_for_previous

KEYS_PER_BLOCK = 64
LEAST_READS = 8
"""Blocks of 128 query rows that read a key, in the mean, from which on a copy pays."""


@dataclass(frozen=True, slots=True)
class DeviceKeys:
    """Which keys are copied. blocks: ``int32[B, 2]`` (batch row, first column of the block, counted
    from ``DeviceQueries.first``). offsets: ``int32[N+1]`` where each row's copy begins."""

    blocks: torch.Tensor
    offsets: torch.Tensor


class KeyScratch:
    """Room for the copy of ``capacity`` keys and values."""

    def __init__(
        self, capacity: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k, self.v = torch.empty(2, capacity, kv_heads, dim, dtype=dtype, device=device)


def gathers(
    counts: Int32Array, num_keys: Int32Array, group: int, *, dim: int, itemsize: int
) -> bool:
    """Whether rows of ``counts`` new tokens that see up to ``num_keys`` keys are copied first.

    group: query heads of a KV head. dim: of a head. itemsize: bytes of a number of the pools.
    """
    total, reads = int(num_keys.sum()), -(-counts * group // 128)
    is_there_room = 0 < total <= gathered_keys(dim, itemsize)
    return is_there_room and int(reads @ num_keys) >= LEAST_READS * total


def key_layout(num_keys: Int32Array) -> tuple[Int32Array, Int32Array]:
    """``DeviceKeys.blocks`` and ``offsets``."""
    offsets = np.zeros(len(num_keys) + 1, np.int32)
    np.cumsum(num_keys, out=offsets[1:])
    return cut(num_keys, KEYS_PER_BLOCK), offsets


def gather(
    queries: DeviceQueries,
    keys: DeviceKeys,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scratch: KeyScratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[K, Hkv, D]`` of ``scratch``, of pools ``[slots, Hkv, D]``."""
    kv_heads, dim = k_pool.shape[1:]
    assert k_pool.shape[1:] == v_pool.shape[1:] == scratch.k.shape[1:]
    assert k_pool.stride()[1:] == v_pool.stride()[1:] == (dim, 1)
    launch(
        _gather_kernel,
        (keys.blocks.shape[0], kv_heads, 2),
        k_pool, k_pool.stride(0), v_pool, v_pool.stride(0), queries.kv_table,
        queries.kv_table.stride(0), queries.rows, queries.first, keys.blocks, keys.offsets,
        scratch.k, scratch.v, kv_heads, dim, KEYS_PER_BLOCK, power_of_two(dim),
        num_warps=4, is_chained=True,
    )  # fmt: skip
    return scratch.k, scratch.v


@triton.jit(do_not_specialize=["table_stride", "first"])
def _gather_kernel(
    k_pool, k_slot, v_pool, v_slot, table, table_stride, rows, first, blocks, offsets, k, v,
    HKV: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (block, head, 0) copies keys, (block, head, 1) values."""
    block = tl.program_id(0)
    i = tl.load(blocks + 2 * block)
    column = tl.load(blocks + 2 * block + 1) + tl.arange(0, BN)
    begin = tl.load(offsets + i)
    is_key = column < tl.load(offsets + i + 1) - begin
    table += tl.load(rows + i).to(tl.int64) * table_stride
    wait_for_previous(CHAINED)
    slot = tl.load(table + first + column, mask=is_key, other=0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = is_key[:, None] & (d < D)[None, :]
    number = tl.program_id(1) * D + d[None, :]
    place = (begin + column).to(tl.int64)[:, None] * (HKV * D) + number
    if tl.program_id(2) == 0:
        found = tl.load(k_pool + slot[:, None] * k_slot + number, mask=inside, other=0.0)
        tl.store(k + place, found, mask=inside)
    else:
        found = tl.load(v_pool + slot[:, None] * v_slot + number, mask=inside, other=0.0)
        tl.store(v + place, found, mask=inside)

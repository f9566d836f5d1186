"""The delta rule with a decay by channel on the GPU, first half: every chunk solved by itself.

Owns: ``solve_`` and ``KdaChunkScratch``. Does not know: states, the order of chunks.

Three launches. For every 16 rows of a chunk of up to 64 tokens: their products with the keys before
them. For every chunk: T = (I + A)^-1. Then W = T (beta e^G k), U = T (beta v), and q and k decayed.

Invariants:
- No factor exceeds 1, however strong the decay. Rows meet keys of earlier blocks at the boundary
  between them (e^(G_i - G_b) e^(G_b - G_j): one is lost to underflow only where the whole is), keys
  of their own block inside the sum over channels, masked before the exponential.
- Sums of g are within a chunk and float64 in differences.
- T by rows and blocks, each from final ones (powers of A lose digits where keys repeat). What
  states are made of goes through products of three tf32 passes, outputs through ``precision``.
Source: as ``../tree_recurrence/chunked.py``, the readable twin. Read next:
``triton_chunks.py`` (the second half).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_rule.triton import CHUNK, Chunks
from hyradix.kernels.triton_support import launch, load32, power_of_two

_BLOCK = 16
_CHANNELS = 8
"""Channels of a block's own products at a time: 16 x 16 x 8 ratios."""


class KdaChunkScratch:
    """By token of the step: mixed (q and k unit and q scaled, v), g, beta; what launches leave."""

    def __init__(
        self, max_tokens: int, num_heads: int, k_dim: int, v_dim: int, device: torch.device
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_tokens, *shape, device=device)

        self.mixed = empty(num_heads * (2 * k_dim + v_dim))
        self.g, self.beta = empty(num_heads, k_dim), empty(num_heads)
        self.system, self.products = (empty(num_heads, CHUNK) for _ in "kq")
        self.w, self.o = empty(num_heads, k_dim), empty(num_heads, v_dim)


def solve_(chunks: Chunks, scratch: KdaChunkScratch, precision: str, *, num_warps: int) -> None:
    """Of ``scratch``, from mixed, g and beta of all tokens: products and w; in place of q e^G q
    (from the chunk's start), of k e^(G_last - G) k, of v U, of a chunk's last g e^G_last.
    """
    num_chunks, x = chunks.table.shape[0], scratch
    heads, dk = x.w.shape[1:]
    dv = x.o.shape[2]
    block_k, block_v = (min(32, power_of_two(n, least=16)) for n in (dk, dv))
    assert x.mixed.shape[1] == heads * (2 * dk + dv)
    launch(
        _products_kernel,
        (num_chunks, heads, CHUNK // _BLOCK),
        chunks.table, x.mixed, x.g, x.system, x.products,
        heads, dk, dv, CHUNK, _BLOCK, block_k, _CHANNELS, precision,
        num_warps=4,
    )  # fmt: skip
    launch(
        _inverse_kernel,
        (num_chunks, heads),
        chunks.table, x.beta, x.system, heads, CHUNK, _BLOCK,
        num_warps=num_warps,
    )  # fmt: skip
    launch(
        _solve_kernel,
        (num_chunks, heads),
        chunks.table, x.mixed, x.g, x.beta, x.system, x.w,
        heads, dk, dv, CHUNK, block_k, block_v,
        num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _products_kernel(
    table, mixed, all_g, systems, all_products,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B rows of k k^T and q k^T of one chunk and head, decays inside, 0 for later keys of q."""
    CHANNELS: tl.constexpr = H * (2 * DK + DV)
    head, start = tl.program_id(1), tl.program_id(2) * B
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    if start >= count:
        return
    c, i = tl.arange(0, C), tl.arange(0, B)
    row, is_row, is_before = first + start + i, start + i < count, c < start
    row_g, row_q = all_g + (row * H + head)[:, None] * DK, mixed + row[:, None] * CHANNELS
    row_q += head * DK
    place = ((row * H + head) * C)[:, None]
    if start > 0:
        key_g = all_g + ((first + c) * H + head)[:, None] * DK
        key = mixed + (first + c)[:, None] * CHANNELS + (H + head) * DK
        k_products, q_products = tl.zeros([B, C], tl.float32), tl.zeros([B, C], tl.float32)
        for begin in range(0, DK, BK):
            d = begin + tl.arange(0, BK)
            before = is_before[:, None] & (d < DK)[None, :]
            inside = is_row[:, None] & (d < DK)[None, :]
            g = load32(key_g + d[None, :], before).to(tl.float64)
            behind = tl.sum(g, 0)[None, :] - tl.cumsum(g, 0)
            keys = load32(key + d[None, :], before) * tl.exp(behind.to(tl.float32))
            grown = tl.cumsum(load32(row_g + d[None, :], inside).to(tl.float64), 0)
            grown = tl.exp(grown.to(tl.float32))
            q = load32(row_q + d[None, :], inside) * grown
            k = load32(row_q + H * DK + d[None, :], inside) * grown
            k_products = tl.dot(k, tl.trans(keys), k_products, input_precision="tf32x3")
            q_products = tl.dot(q, tl.trans(keys), q_products, input_precision=PRECISION)
        written = is_row[:, None] & is_before[None, :]
        tl.store(systems + place + c[None, :], k_products, mask=written)
        tl.store(all_products + place + c[None, :], q_products, mask=written)
    k_own, q_own = tl.zeros([B, B], tl.float32), tl.zeros([B, B], tl.float32)
    is_earlier = (i[:, None] >= i[None, :])[:, :, None]
    for begin in range(0, DK, BD):
        d = begin + tl.arange(0, BD)
        inside = is_row[:, None] & (d < DK)[None, :]
        sums = tl.cumsum(load32(row_g + d[None, :], inside).to(tl.float64), 0)
        ratio = tl.where(is_earlier, sums[:, None, :] - sums[None, :, :], float("-inf"))
        q = load32(row_q + d[None, :], inside)
        k = load32(row_q + H * DK + d[None, :], inside)
        weighted = tl.exp(ratio.to(tl.float32)) * k[None, :, :]
        k_own += tl.sum(k[:, None, :] * weighted, 2)
        q_own += tl.sum(q[:, None, :] * weighted, 2)
    written = is_row[:, None]
    tl.store(systems + place + start + i[None, :], k_own, mask=written)
    tl.store(all_products + place + start + i[None, :], q_own, mask=written)
    later = is_row[:, None] & (c >= start + B)[None, :]
    tl.store(all_products + place + c[None, :], tl.zeros([B, C], tl.float32), mask=later)


@triton.jit
def _inverse_kernel(
    table, all_beta, systems, H: tl.constexpr, C: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """T = (I + beta k k^T below the diagonal)^-1 of one chunk and head, in place, above: unwritten.

    First the blocks of the diagonal, all by their rows at once; then block row after block row.
    """
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64) * H + tl.program_id(1)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    if count == 0:
        return
    c, i = tl.arange(0, C), tl.arange(0, B)
    is_token = (c < count)[:, None]
    systems += first * C
    place = systems + (c * (H * C))[:, None] + c[None, :]
    is_same = c[:, None] // B == c[None, :] // B
    beta = load32(all_beta + first + c * H, c < count)
    system = load32(place, is_token & is_same & (c[:, None] > c[None, :])) * beta[:, None]
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for j in range(1, B):
        is_row = (c % B == j)[:, None] & is_same
        row = tl.sum(tl.where(is_row, system, 0.0), 0)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse -= tl.where(is_row, solved[None, :], 0.0)
    tl.debug_barrier()  # what is overwritten has been read by all
    tl.store(place, inverse, mask=is_token & is_same)
    for begin in range(B, count, B):
        tl.debug_barrier()  # and what was written can be read
        is_row, is_final = (begin + i < count)[:, None], (c < begin)[:, None]
        rows = systems + ((begin + i) * (H * C))[:, None]
        left = load32(rows + c[None, :], is_row & (c < begin)[None, :])
        left *= load32(all_beta + first + (begin + i) * H, begin + i < count)[:, None]
        final = load32(place, is_final & (c[:, None] >= c[None, :]))
        right = tl.dot(left, final, input_precision="tf32x3")
        own = load32(rows + begin + i[None, :], is_row & (begin + i < count)[None, :])
        right = tl.dot(own, right, input_precision="tf32x3")
        tl.debug_barrier()
        tl.store(rows + c[None, :], -right, mask=is_row & (c < begin)[None, :])


@triton.jit
def _solve_kernel(
    table, mixed, all_g, all_beta, systems, all_w,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One chunk and head; what is overwritten is read by this program only."""
    CHANNELS: tl.constexpr = H * (2 * DK + DV)
    head = tl.program_id(1)
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    if count == 0:
        return
    c = tl.arange(0, C)
    is_token, row = c < count, first * H + head
    beta = load32(all_beta + row + c * H, is_token)[:, None]
    inverse = systems + row * C + (c * (H * C))[:, None] + c[None, :]
    inverse = load32(inverse, is_token[:, None] & (c[:, None] >= c[None, :]))
    token = mixed + first * CHANNELS
    last_g = all_g + (row + (count - 1) * H) * DK
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)
        inside = is_token[:, None] & (d < DK)[None, :]
        own = row * DK + (c * (H * DK))[:, None] + d[None, :]
        g = load32(all_g + own, inside).to(tl.float64)
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        grown = tl.exp(sums.to(tl.float32))
        behind = tl.exp((whole[None, :] - sums).to(tl.float32))
        q_place = token + head * DK + (c * CHANNELS)[:, None] + d[None, :]
        q, k = load32(q_place, inside), load32(q_place + H * DK, inside)
        w = tl.dot(inverse, k * grown * beta, input_precision="tf32x3")
        tl.store(all_w + own, w, mask=inside)
        tl.debug_barrier()  # q, k and g are read by all before they are written
        tl.store(q_place, q * grown, mask=inside)
        tl.store(q_place + H * DK, k * behind, mask=inside)
        tl.store(last_g + d, tl.exp(whole.to(tl.float32)), mask=d < DK)
    for begin in range(0, DV, BV):
        d = begin + tl.arange(0, BV)
        inside = is_token[:, None] & (d < DV)[None, :]
        v_place = token + 2 * H * DK + head * DV + (c * CHANNELS)[:, None] + d[None, :]
        u = tl.dot(inverse, load32(v_place, inside) * beta, input_precision="tf32x3")
        tl.debug_barrier()  # likewise v
        tl.store(v_place, u, mask=inside)

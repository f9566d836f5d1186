"""The delta rule with a decay by channel over many tokens on the GPU: chunks solved, then passed.

Owns: ``chunked_``: outputs, final and saved states of a ragged batch; ``KdaChunkScratch``. Does not
know: convolution, gates, norms.

Three launches. For every 16 rows of a chunk of up to 64 tokens: their products with the keys before
them. For every chunk: T = (I + A)^-1, W = T (beta e^G k), U = T (beta v), and q and k decayed. For
every sequence and block of d_v columns: u = U - W S, o = (e^G q) S + (q k) u, S <- e^G_last S +
(e^(G_last - G) k)^T u, chunk after chunk, S in registers.

Invariants:
- No chunk crosses a position whose state is saved: a save is the state behind a chunk, exact.
- No factor exceeds 1, however strong the decay. Rows meet keys of earlier blocks at the boundary
  between them (e^(G_i - G_b) e^(G_b - G_j): one is lost to underflow only where the whole is), keys
  of their own block inside the sum over channels, masked before the exponential.
- Sums of g are within a chunk and float64 in differences.
- T by rows and blocks, each from final ones (powers of A lose digits where keys repeat). What
  states are made of goes through products of three tf32 passes, outputs through one.
Source: as ``recurrence.py``, the readable twin. Read next: ``triton_prefill.py`` (the caller).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_rule.triton import CHUNK, Chunks
from hyradix.kernels.triton_support import launch, load32, power_of_two
from hyradix.kernels.triton_table import ChunkConfig, kda_chunk_config

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


def chunked_(
    chunks: Chunks,
    state: torch.Tensor,
    scratch: KdaChunkScratch,
    *,
    config: ChunkConfig | None = None,
) -> None:
    """From each sequence's slot: ``scratch.o``, the slot's state, the saves.

    state: ``float32[slots, H, dk, dv]``. scratch: mixed, g, beta of all tokens; q becomes e^G q
    (from the chunk's start), k becomes e^(G_last - G) k, v becomes U, a chunk's last g e^G_last.
    """
    _, heads, dk, dv = state.shape
    assert state.is_contiguous()
    config = config or kda_chunk_config(state.device)
    num_chunks, x = chunks.table.shape[0], scratch
    block_k, block_v = (min(32, power_of_two(n, least=16)) for n in (dk, dv))
    assert x.mixed.shape[1] == heads * (2 * dk + dv)
    launch(
        _products_kernel,
        (num_chunks, heads, CHUNK // _BLOCK),
        chunks.table, x.mixed, x.g, x.system, x.products,
        heads, dk, dv, CHUNK, _BLOCK, block_k, _CHANNELS,
        num_warps=4,
    )  # fmt: skip
    launch(
        _solve_kernel,
        (num_chunks, heads),
        chunks.table, x.mixed, x.g, x.beta, x.system, x.w,
        heads, dk, dv, CHUNK, _BLOCK, block_k, block_v,
        num_warps=config.solve_warps,
    )  # fmt: skip
    block_v = max(min(config.block_v, power_of_two(dv)), 16)
    launch(
        _pass_kernel,
        (chunks.slots.shape[0] * heads * triton.cdiv(dv, block_v),),
        chunks.table, chunks.offsets, chunks.slots, state, x.mixed, x.g, x.w, x.products, x.o,
        heads, dk, dv, CHUNK, power_of_two(dk, least=32) // 2, block_v, triton.cdiv(dv, block_v),
        num_warps=config.pass_warps,
    )  # fmt: skip


@triton.jit
def _products_kernel(
    table, mixed, all_g, systems, all_products,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """B rows of k k^T and q k^T of one chunk and head, decays inside; what is later: unwritten."""
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
            q_products = tl.dot(q, tl.trans(keys), q_products, input_precision="tf32")
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
    written = is_row[:, None] & is_row[None, :]
    tl.store(systems + place + start + i[None, :], k_own, mask=written)
    tl.store(all_products + place + start + i[None, :], q_own, mask=written)


@triton.jit
def _inverse(system, count, C: tl.constexpr, B: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular ``[C, C]``, 0 from row ``count`` on.

    First the blocks of the diagonal, all by their rows at once; then block row after block row.
    """
    c = tl.arange(0, C)
    is_same = c[:, None] // B == c[None, :] // B
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for i in range(1, B):
        is_row = (c % B == i)[:, None] & is_same
        row = tl.sum(tl.where(is_row, system, 0.0), 0)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse -= tl.where(is_row, solved[None, :], 0.0)
    for begin in range(B, count, B):
        is_row = (c >= begin) & (c < begin + B)
        left = tl.where(is_row[:, None] & (c < begin)[None, :], system, 0.0)
        right = tl.dot(left, inverse, input_precision="tf32x3")
        own = tl.where(is_same, inverse, 0.0)
        inverse -= tl.dot(own, right, input_precision="tf32x3")
    return inverse


@triton.jit
def _solve_kernel(
    table, mixed, all_g, all_beta, systems, all_w,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One chunk and head; what is overwritten is read by this program only."""
    CHANNELS: tl.constexpr = H * (2 * DK + DV)
    head = tl.program_id(1)
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    c = tl.arange(0, C)
    is_token, token = c < count, first + c
    place = (token * H + head)[:, None]
    beta = load32(all_beta + token * H + head, is_token)[:, None]
    is_later = is_token[:, None] & (c[:, None] > c[None, :])
    inverse = _inverse(load32(systems + place * C + c[None, :], is_later) * beta, count, C, B)
    last_g = all_g + ((first + count - 1) * H + head) * DK
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)
        inside = is_token[:, None] & (d < DK)[None, :]
        g = load32(all_g + place * DK + d[None, :], inside).to(tl.float64)
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        grown = tl.exp(sums.to(tl.float32))
        behind = tl.exp((whole[None, :] - sums).to(tl.float32))
        q_place = mixed + token[:, None] * CHANNELS + head * DK + d[None, :]
        q, k = load32(q_place, inside), load32(q_place + H * DK, inside)
        w = tl.dot(inverse, k * grown * beta, input_precision="tf32x3")
        tl.store(all_w + place * DK + d[None, :], w, mask=inside)
        tl.debug_barrier()  # q, k and g are read by all before they are written
        tl.store(q_place, q * grown, mask=inside)
        tl.store(q_place + H * DK, k * behind, mask=inside)
        tl.store(last_g + d, tl.exp(whole.to(tl.float32)), mask=(d < DK) & (count > 0))
    for begin in range(0, DV, BV):
        d = begin + tl.arange(0, BV)
        inside = is_token[:, None] & (d < DV)[None, :]
        v_place = mixed + token[:, None] * CHANNELS + 2 * H * DK + head * DV + d[None, :]
        u = tl.dot(inverse, load32(v_place, inside) * beta, input_precision="tf32x3")
        tl.debug_barrier()  # likewise v
        tl.store(v_place, u, mask=inside)


@triton.jit
def _pass_kernel(
    table, offsets, slots, all_states, mixed, all_g, all_w, all_products, all_o,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The state is held as its upper and lower BK rows of d_k: smaller operands, no spills."""
    CHANNELS: tl.constexpr = H * (2 * DK + DV)
    sequence = tl.program_id(0) // (BLOCKS * H)
    head = tl.program_id(0) // BLOCKS % H
    slot = tl.load(slots + sequence).to(tl.int64)
    last_chunk = tl.load(offsets + sequence + 1)
    c, d = tl.arange(0, C), tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_v, in_upper, in_lower = column < DV, d < DK, d + BK < DK
    upper_inside = in_upper[:, None] & in_v[None, :]
    lower_inside = in_lower[:, None] & in_v[None, :]
    place = (head * DK + d[:, None]) * DV + column[None, :]
    own = all_states + slot * (H * DK * DV) + place
    upper = tl.load(own, mask=upper_inside, other=0.0)
    lower = tl.load(own + BK * DV, mask=lower_inside, other=0.0)
    for chunk in range(tl.load(offsets + sequence), last_chunk):
        first = tl.load(table + 3 * chunk).to(tl.int64)
        count = tl.load(table + 3 * chunk + 1)
        save = tl.load(table + 3 * chunk + 2).to(tl.int64)
        is_token, token = c < count, first + c
        in_columns = is_token[:, None] & in_v[None, :]
        tokens_upper = is_token[:, None] & in_upper[None, :]
        tokens_lower = is_token[:, None] & in_lower[None, :]
        row = (token * H + head)[:, None]
        w_place = all_w + row * DK + d[None, :]
        q_place = mixed + token[:, None] * CHANNELS + head * DK + d[None, :]
        k_place = q_place + H * DK
        u_place = mixed + token[:, None] * CHANNELS + 2 * H * DK + head * DV + column[None, :]
        read = tl.dot(load32(w_place, tokens_upper), upper, input_precision="tf32x3")
        read = tl.dot(load32(w_place + BK, tokens_lower), lower, read, input_precision="tf32x3")
        u = load32(u_place, in_columns) - read
        o = tl.dot(load32(q_place, tokens_upper), upper, input_precision="tf32")
        o = tl.dot(load32(q_place + BK, tokens_lower), lower, o, input_precision="tf32")
        is_earlier = is_token[:, None] & (c[:, None] >= c[None, :])
        products = load32(all_products + row * C + c[None, :], is_earlier)
        o = tl.dot(products, u, o, input_precision="tf32")
        tl.store(all_o + row * DV + column[None, :], o, mask=in_columns)
        kept = all_g + ((first + count - 1) * H + head) * DK + d
        k = tl.trans(load32(k_place, tokens_upper))
        upper *= load32(kept, in_upper)[:, None]
        upper = tl.dot(k, u, upper, input_precision="tf32x3")
        k = tl.trans(load32(k_place + BK, tokens_lower))
        lower *= load32(kept + BK, in_lower)[:, None]
        lower = tl.dot(k, u, lower, input_precision="tf32x3")
        if save != 0:
            there = all_states + save * (H * DK * DV) + place
            tl.store(there, upper, mask=upper_inside)
            tl.store(there + BK * DV, lower, mask=lower_inside)
    if slot != 0:
        tl.store(own, upper, mask=upper_inside)
        tl.store(own + BK * DV, lower, mask=lower_inside)

"""The delta rule with a decay by channel over many tokens on the GPU: chunks solved, then passed.

Owns: ``chunked_``: outputs, final and saved states of a ragged batch. Does not know: convolution,
gates, norms.

After ``solve_``, one launch. For every sequence and block of d_v columns: u = U - W S, o = (e^G q)
S + (q k) u, S <- e^G_last S + (e^(G_last - G) k)^T u, chunk after chunk, S in registers.

Invariants:
- No chunk crosses a position whose state is saved: a save is the state behind a chunk, exact.
- What states are made of goes through products of three tf32 passes, outputs through
  ``output_precision``.
Source: as ``../tree_recurrence/chunked.py``, the readable twin. Read next:
``triton_solve.py`` (the first half), ``triton_prefill.py`` (the caller).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_rule.triton import CHUNK, Chunks
from hyradix.kernels.kda.triton_solve import KdaChunkScratch, solve_
from hyradix.kernels.triton_support import ceil_div, launch, load32, output_precision, power_of_two
from hyradix.kernels.triton_table import ChunkConfig, kda_chunk_config

__all__ = ["KdaChunkScratch", "chunked_"]


def chunked_(
    chunks: Chunks,
    state: torch.Tensor,
    scratch: KdaChunkScratch,
    dtype: torch.dtype,
    *,
    config: ChunkConfig | None = None,
) -> None:
    """From each sequence's slot: ``scratch.o``, the slot's state, the saves.

    state: ``float32[slots, H, dk, dv]``. scratch: mixed, g, beta of all tokens, which
    ``solve_`` overwrites. dtype: of activations.
    """
    _, heads, dk, dv = state.shape
    assert state.is_contiguous()
    config = config or kda_chunk_config(state.device)
    x = scratch
    assert x.mixed.shape[1] == heads * (2 * dk + dv)
    precision = output_precision(dtype)
    solve_(chunks, x, precision, num_warps=config.solve_warps)
    block_v = max(min(config.block_v, power_of_two(dv)), 16)
    launch(
        _pass_kernel,
        (chunks.slots.shape[0] * heads * ceil_div(dv, block_v),),
        chunks.table, chunks.offsets, chunks.slots, state, x.mixed, x.g, x.w, x.products, x.o,
        heads, dk, dv, CHUNK, power_of_two(dk, least=32) // 2, block_v, ceil_div(dv, block_v),
        precision,
        num_warps=config.pass_warps,
    )  # fmt: skip


@triton.jit
def _pass_kernel(
    table, offsets, slots, all_states, mixed, all_g, all_w, all_products, all_o,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
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
    upper = tl.load(own, mask=upper_inside & (slot != 0), other=0.0)  # padding starts from nothing
    lower = tl.load(own + BK * DV, mask=lower_inside & (slot != 0), other=0.0)
    for chunk in range(tl.load(offsets + sequence), last_chunk):
        first = tl.load(table + 3 * chunk).to(tl.int64)
        count = tl.load(table + 3 * chunk + 1)
        save = tl.load(table + 3 * chunk + 2).to(tl.int64)
        is_token = c < count
        in_columns = is_token[:, None] & in_v[None, :]
        tokens_upper = is_token[:, None] & in_upper[None, :]
        tokens_lower = is_token[:, None] & in_lower[None, :]
        row = first * H + head  # of the chunk's first token; 32 bits from there on
        w_place = all_w + row * DK + (c * (H * DK))[:, None] + d[None, :]
        token = mixed + first * CHANNELS
        q_place = token + head * DK + (c * CHANNELS)[:, None] + d[None, :]
        k_place = token + (H + head) * DK + (c * CHANNELS)[:, None] + d[None, :]
        u_place = token + 2 * H * DK + head * DV + (c * CHANNELS)[:, None] + column[None, :]
        read = tl.dot(load32(w_place, tokens_upper), upper, input_precision="tf32x3")
        read = tl.dot(load32(w_place + BK, tokens_lower), lower, read, input_precision="tf32x3")
        u = load32(u_place, in_columns) - read
        o = tl.dot(load32(q_place, tokens_upper), upper, input_precision=PRECISION)
        o = tl.dot(load32(q_place + BK, tokens_lower), lower, o, input_precision=PRECISION)
        products = all_products + row * C + (c * (H * C))[:, None] + c[None, :]
        o = tl.dot(load32(products, is_token[:, None]), u, o, input_precision=PRECISION)
        o_place = all_o + row * DV + (c * (H * DV))[:, None] + column[None, :]
        tl.store(o_place, o, mask=in_columns)
        kept = all_g + (row + (count - 1) * H) * DK + d
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

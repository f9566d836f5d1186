"""The state of Mamba2 over many tokens on the GPU: chunks passed on in order, outputs with them.

Owns: ``chunked_``: outputs, final and saved states of a ragged batch; ``Mamba2ChunkScratch``. Does
not know: convolution, gates, norms, D x.

Two launches. The first: q k^T within every chunk of up to 64 tokens, once for all heads of a group.
The second, for every sequence, head and block of d_v columns: o = e^G q S + (q k) u with u = dt v,
S <- e^G_last S + (e^(G_last - G) k)^T u, chunk after chunk, S in registers. Rows of S are
independent: of more than 128, every 128 have a launch of their own.

Invariants:
- No chunk crosses a position whose state is saved: a save is the state behind a chunk, exact.
- What states are made of goes through products of three tf32 passes, outputs through
  ``output_precision``.
- Sums of g are within a chunk and float64 in differences; ratios only, masked before the
  exponential: no factor exceeds 1.
Source: DESIGN section 6.1. Read next: ``../tree_recurrence/chunked.py`` (the readable twin),
``triton_prefill.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_rule.triton import CHUNK, Chunks
from hyradix.kernels.triton_support import ceil_div, launch, load32, output_precision, power_of_two
from hyradix.kernels.triton_table import ChunkConfig, mamba2_chunk_config

_ROWS = 128
"""Rows of d_k that a program holds: twice as many would spill."""


class Mamba2ChunkScratch:
    """By token of the step: what is convolved (q, k, v), g and dt, q k^T of its chunk, o."""

    def __init__(
        self,
        max_tokens: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device,
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_tokens, *shape, device=device)

        self.mixed = empty(2 * num_k_heads * k_dim + num_v_heads * v_dim)
        self.g, self.dt = empty(num_v_heads), empty(num_v_heads)
        self.products = empty(num_k_heads, CHUNK)
        self.o = empty(num_v_heads, v_dim)


def chunked_(
    chunks: Chunks,
    num_k_heads: int,
    state: torch.Tensor,
    scratch: Mamba2ChunkScratch,
    dtype: torch.dtype,
    *,
    config: ChunkConfig | None = None,
) -> None:
    """From each sequence's slot: ``scratch.o``, the slot's state, the saves.

    state: ``float32[slots, Hv, dk, dv]``. scratch: mixed, g (log decay) and dt of all tokens.
    dtype: of activations.
    """
    _, num_v_heads, dk, dv = state.shape
    assert state.is_contiguous()
    config = config or mamba2_chunk_config(state.device)
    block_v = max(min(config.block_v, power_of_two(dv)), 16)
    x = scratch
    assert x.mixed.shape[1] == 2 * num_k_heads * dk + num_v_heads * dv
    launch(
        _products_kernel,
        (chunks.table.shape[0], num_k_heads),
        chunks.table, x.mixed, x.products,
        x.mixed.shape[1], num_k_heads, dk, CHUNK, min(32, power_of_two(dk, least=16)),
        output_precision(dtype),
        num_warps=config.solve_warps,
    )  # fmt: skip
    part = min(power_of_two(dk, least=32), _ROWS)
    for first_row in range(0, dk, part):
        launch(
            _pass_kernel,
            (chunks.slots.shape[0] * num_v_heads * ceil_div(dv, block_v),),
            chunks.table, chunks.offsets, chunks.slots, state, x.mixed, x.g, x.dt, x.products, x.o,
            x.mixed.shape[1], num_v_heads, num_v_heads // num_k_heads, dk, dv, CHUNK,
            part // 2, block_v, ceil_div(dv, block_v), first_row,
            output_precision(dtype),
            num_warps=config.pass_warps,
        )  # fmt: skip


@triton.jit
def _products_kernel(
    table, mixed, all_products,
    CHANNELS: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q k^T of one chunk and group; which of them count, the pass says."""
    group = tl.program_id(1)
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    if count == 0:
        return
    c = tl.arange(0, C)
    is_token, token = c < count, first + c
    products = tl.zeros([C, C], tl.float32)
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)
        inside = is_token[:, None] & (d < DK)[None, :]
        place = mixed + token[:, None] * CHANNELS + group * DK + d[None, :]
        q, k = load32(place, inside), load32(place + HK * DK, inside)
        products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
    place = (token * HK + group)[:, None] * C + c[None, :]
    tl.store(all_products + place, products, mask=is_token[:, None])


@triton.jit
def _pass_kernel(
    table, offsets, slots, all_states, mixed, all_g, all_dt, all_products, all_o,
    CHANNELS: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST_ROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state is held as its upper and lower BK rows of d_k: smaller operands, no spills.

    They are those from FIRST_ROW on; o is added to what the rows before them have given.
    """
    HK: tl.constexpr = HV // RATIO
    sequence = tl.program_id(0) // (BLOCKS * HV)
    head = tl.program_id(0) // BLOCKS % HV
    group = head // RATIO
    slot = tl.load(slots + sequence).to(tl.int64)
    last_chunk = tl.load(offsets + sequence + 1)
    c, d = tl.arange(0, C), FIRST_ROW + tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_v, in_upper, in_lower = column < DV, d < DK, d + BK < DK
    upper_inside = in_upper[:, None] & in_v[None, :]
    lower_inside = in_lower[:, None] & in_v[None, :]
    place = (head * DK + d[:, None]) * DV + column[None, :]
    own = all_states + slot * (HV * DK * DV) + place
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
        row = first * HV + head  # of the chunk's first token; 32 bits from there on
        g = load32(all_g + row + c * HV, is_token).to(tl.float64)
        sums = tl.cumsum(g, 0)
        whole = tl.sum(g, 0)
        x = mixed + first * CHANNELS
        q_place = x + group * DK + (c * CHANNELS)[:, None] + d[None, :]
        k_place = x + (HK + group) * DK + (c * CHANNELS)[:, None] + d[None, :]
        u_place = x + 2 * HK * DK + head * DV + (c * CHANNELS)[:, None] + column[None, :]
        u = load32(u_place, in_columns) * load32(all_dt + row + c * HV, is_token)[:, None]
        o = tl.dot(load32(q_place, tokens_upper), upper, input_precision=PRECISION)
        o = tl.dot(load32(q_place + BK, tokens_lower), lower, o, input_precision=PRECISION)
        o *= tl.exp(sums.to(tl.float32))[:, None]
        o_place = all_o + row * DV + (c * (HV * DV))[:, None] + column[None, :]
        if FIRST_ROW > 0:
            o += load32(o_place, in_columns)
        else:
            ratio = sums[:, None] - sums[None, :]
            ratio = tl.where(c[:, None] >= c[None, :], ratio, float("-inf")).to(tl.float32)
            products = (c * (HK * C))[:, None] + c[None, :]
            products = load32(
                all_products + (first * HK + group) * C + products, is_token[:, None]
            ) * tl.exp(ratio)
            o = tl.dot(products, u, o, input_precision=PRECISION)
        tl.store(o_place, o, mask=in_columns)
        u *= tl.exp((whole - sums).to(tl.float32))[:, None]
        kept = tl.exp(whole.to(tl.float32))
        k = tl.trans(load32(k_place, tokens_upper))
        upper = tl.dot(k, u, upper * kept, input_precision="tf32x3")
        k = tl.trans(load32(k_place + BK, tokens_lower))
        lower = tl.dot(k, u, lower * kept, input_precision="tf32x3")
        if save != 0:
            there = all_states + save * (HV * DK * DV) + place
            tl.store(there, upper, mask=upper_inside)
            tl.store(there + BK * DV, lower, mask=lower_inside)
    if slot != 0:
        tl.store(own, upper, mask=upper_inside)
        tl.store(own + BK * DV, lower, mask=lower_inside)

"""The gated delta rule over many tokens on the GPU: chunks solved at once, then passed in order.

Owns: ``chunked_``: outputs, final and saved states of a ragged batch. Does not know: convolution,
gates, norms.

Two launches. The first, for every chunk of up to 64 tokens by itself: T = (I + A)^-1, W = T (beta
e^G k), U = T (beta v), and the products of q and k. The second, for every sequence and block of d_v
columns: u = U - W S, o = e^G q S + (q k) u, S <- e^G_last S + (e^(G_last - G) k)^T u, chunk after
chunk, S in registers.

Invariants:
- No chunk crosses a position whose state is saved: a save is the state behind a chunk, exact.
- T by rows, each from final ones (powers of A lose digits where keys repeat). What states are made
  of goes through products of three tf32 passes, outputs through ``output_precision``.
- Sums of g are within a chunk and float64 in differences; ratios only.
Source: as ``../tree_recurrence/chunked.py``, the readable twin. Read next:
``../gated_delta_net/triton_prefill.py`` (the caller).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import ceil_div, launch, load32, output_precision, power_of_two
from hyradix.kernels.triton_table import ChunkConfig, chunk_config

CHUNK = 64
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunks:
    """How tokens fall into chunks; ``int32`` tensors on the device.

    table: ``[NC, 3]`` first token, tokens, slot of the save behind it or 0; in order, sequence by
    sequence. offsets: ``[N+1]`` sequence i has chunks offsets[i] : offsets[i+1]. slots: ``[N]``.
    """

    table: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor


def chunk_table(
    cu_seqlens: Int32Array,
    save_offsets: Int32Array,
    save_at: Int32Array,
    save_slots: Int32Array,
) -> tuple[Int32Array, Int32Array]:
    """``Chunks.table`` and ``offsets`` on the host; arguments as in ``RaggedStates``.

    A sequence's positions are cut every ``CHUNK`` tokens and at its saves, which all differ.
    """
    entries: list[tuple[int, int, int]] = []
    offsets = [0]
    for i in range(len(cu_seqlens) - 1):
        first, count = int(cu_seqlens[i]), int(cu_seqlens[i + 1] - cu_seqlens[i])
        saves = slice(int(save_offsets[i]), int(save_offsets[i + 1]))
        slots = dict(zip(save_at[saves].tolist(), save_slots[saves].tolist(), strict=True))
        begin = 0
        for cut in sorted({*slots, count} - {0}):
            while begin < cut:
                size = min(CHUNK, cut - begin)
                begin += size
                entries.append((first + begin - size, size, slots.get(begin, 0)))
        offsets.append(len(entries))
    return np.array(entries, np.int32).reshape(-1, 3), np.array(offsets, np.int32)


class ChunkScratch:
    """By token of the step: inputs (q, k unit and q scaled), what the first launch leaves, o."""

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

        self.q, self.k = (empty(num_k_heads, k_dim) for _ in "qk")
        self.v = empty(num_v_heads, v_dim)
        self.g, self.beta = (empty(num_v_heads) for _ in "gb")
        self.w, self.u = empty(num_v_heads, k_dim), empty(num_v_heads, v_dim)
        self.products = empty(num_v_heads, CHUNK)
        self.o = empty(num_v_heads, v_dim)


def chunked_(
    chunks: Chunks,
    state: torch.Tensor,
    scratch: ChunkScratch,
    dtype: torch.dtype,
    *,
    config: ChunkConfig | None = None,
) -> None:
    """From each sequence's slot: ``scratch.o``, the slot's state, the saves.

    state: ``float32[slots, Hv, dk, dv]``. scratch: q, k, v, g, beta of all tokens; beta becomes
    e^G (from the chunk's start to the token), g becomes e^(G_last - G). dtype: of activations.
    """
    _, num_v_heads, dk, dv = state.shape
    assert state.is_contiguous()
    config = config or chunk_config(state.device)
    ratio = num_v_heads // scratch.k.shape[1]
    block_v = max(min(config.block_v, power_of_two(dv)), 16)
    x = scratch
    launch(
        _solve_kernel,
        (chunks.table.shape[0], num_v_heads),
        chunks.table, x.q, x.k, x.v, x.g, x.beta, x.w, x.u, x.products,
        num_v_heads, ratio, dk, dv, CHUNK, min(32, power_of_two(dk, least=16)),
        min(32, power_of_two(dv, least=16)), output_precision(dtype),
        num_warps=config.solve_warps,
    )  # fmt: skip
    launch(
        _pass_kernel,
        (chunks.slots.shape[0] * num_v_heads * ceil_div(dv, block_v),),
        chunks.table, chunks.offsets, chunks.slots, state, x.q, x.k, x.beta, x.g, x.w, x.u,
        x.products, x.o,
        num_v_heads, ratio, dk, dv, CHUNK, power_of_two(dk, least=32) // 2, block_v,
        ceil_div(dv, block_v), output_precision(dtype),
        num_warps=config.pass_warps,
    )  # fmt: skip


@triton.jit
def _solve_kernel(
    table, all_q, all_k, all_v, all_g, all_beta, all_w, all_u, all_products,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HK: tl.constexpr = HV // RATIO
    head = tl.program_id(1)
    first = tl.load(table + 3 * tl.program_id(0)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(0) + 1)
    c = tl.arange(0, C)
    is_token = c < count
    token = first + c
    g = load32(all_g + token * HV + head, is_token).to(tl.float64)
    beta = load32(all_beta + token * HV + head, is_token)
    is_earlier = c[:, None] >= c[None, :]
    sums = tl.sum(tl.where(is_earlier, g[None, :], 0.0), 1)
    ratio = tl.where(is_earlier, sums[:, None] - sums[None, :], float("-inf"))
    ratio = tl.exp(ratio.to(tl.float32))
    grown = tl.exp(sums.to(tl.float32))
    system, products = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)
        inside = is_token[:, None] & (d < DK)[None, :]
        place = (token * HK + head // RATIO)[:, None] * DK + d[None, :]
        k, q = load32(all_k + place, inside), load32(all_q + place, inside)
        system = tl.dot(k, tl.trans(k), system, input_precision="tf32x3")
        products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
    system = tl.where(c[:, None] > c[None, :], system * ratio * beta[:, None], 0.0)
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for i in range(1, count):  # row i from the rows before it
        row = tl.sum(tl.where((c == i)[:, None], system, 0.0), 0)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse -= tl.where((c == i)[:, None], solved[None, :], 0.0)
    place = (token * HV + head)[:, None]
    tl.store(all_products + place * C + c[None, :], products * ratio, mask=is_token[:, None])
    tl.debug_barrier()  # g and beta are read by all before they are written
    behind = tl.exp((tl.sum(g, 0) - sums).to(tl.float32))
    tl.store(all_g + token * HV + head, behind, mask=is_token)
    tl.store(all_beta + token * HV + head, grown, mask=is_token)
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)
        inside = is_token[:, None] & (d < DK)[None, :]
        k = load32(all_k + (token * HK + head // RATIO)[:, None] * DK + d[None, :], inside)
        w = tl.dot(inverse, k * (beta * grown)[:, None], input_precision="tf32x3")
        tl.store(all_w + place * DK + d[None, :], w, mask=inside)
    for begin in range(0, DV, BV):
        d = begin + tl.arange(0, BV)
        inside = is_token[:, None] & (d < DV)[None, :]
        v = load32(all_v + place * DV + d[None, :], inside)
        u = tl.dot(inverse, v * beta[:, None], input_precision="tf32x3")
        tl.store(all_u + place * DV + d[None, :], u, mask=inside)


@triton.jit
def _pass_kernel(
    table, offsets, slots, all_states, all_q, all_k, all_grown, all_behind, all_w, all_u,
    all_products, all_o,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state is held as its upper and lower BK rows of d_k: smaller operands, no spills."""
    HK: tl.constexpr = HV // RATIO
    sequence = tl.program_id(0) // (BLOCKS * HV)
    head = tl.program_id(0) // BLOCKS % HV
    slot = tl.load(slots + sequence).to(tl.int64)
    last_chunk = tl.load(offsets + sequence + 1)
    c, d = tl.arange(0, C), tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_v, in_upper, in_lower = column < DV, d < DK, d + BK < DK
    upper_inside = in_upper[:, None] & in_v[None, :]
    lower_inside = in_lower[:, None] & in_v[None, :]
    place = (head * DK + d[:, None]) * DV + column[None, :]
    own = all_states + slot * (HV * DK * DV) + place
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
        row = (token * HV + head)[:, None]
        w_place = all_w + row * DK + d[None, :]
        key_place = (token * HK + head // RATIO)[:, None] * DK + d[None, :]
        grown = load32(all_grown + token * HV + head, is_token)
        behind = load32(all_behind + token * HV + head, is_token)
        kept = tl.load(all_grown + (first + count - 1) * HV + head)
        read = tl.dot(load32(w_place, tokens_upper), upper, input_precision="tf32x3")
        read = tl.dot(load32(w_place + BK, tokens_lower), lower, read, input_precision="tf32x3")
        u = load32(all_u + row * DV + column[None, :], in_columns) - read
        o = tl.dot(load32(all_q + key_place, tokens_upper), upper, input_precision=PRECISION)
        q = load32(all_q + key_place + BK, tokens_lower)
        o = tl.dot(q, lower, o, input_precision=PRECISION) * grown[:, None]
        products = load32(all_products + row * C + c[None, :], is_token[:, None])
        o = tl.dot(products, u, o, input_precision=PRECISION)
        tl.store(all_o + row * DV + column[None, :], o, mask=in_columns)
        u *= behind[:, None]
        k = tl.trans(load32(all_k + key_place, tokens_upper))
        upper = tl.dot(k, u, upper * kept, input_precision="tf32x3")
        k = tl.trans(load32(all_k + key_place + BK, tokens_lower))
        lower = tl.dot(k, u, lower * kept, input_precision="tf32x3")
        if save != 0:
            there = all_states + save * (HV * DK * DV) + place
            tl.store(there, upper, mask=upper_inside)
            tl.store(there + BK * DV, lower, mask=lower_inside)
    if slot != 0:
        tl.store(own, upper, mask=upper_inside)
        tl.store(own + BK * DV, lower, mask=lower_inside)

"""The gated delta rule over many tokens on the GPU: chunks solved at once, then passed in order.

Owns: ``chunked_``: outputs, final and saved states of a ragged batch. Does not know: convolution,
gates, norms.

Two launches. The first, for every chunk of up to 64 tokens by itself: T = (I + A)^-1, W = T (beta
e^G k), U = T (beta v), and the products of q and k. The second, for every sequence and block of d_v
columns: u = U - W S, o = e^G q S + (q k) u, S <- e^G_last S + (e^(G_last - G) k)^T u, chunk after
chunk, S in registers.

Invariants:
- No chunk crosses a position whose state is saved: a save is the state behind a chunk, exact.
- What states are made of goes through products of three float16 passes (as near as three of tf32),
  outputs through one, where activations are not float32.
- Sums of g are within a chunk and float64 in differences; ratios only.
Source: as ``../tree_recurrence/chunked.py``, the readable twin. Read next: ``triton_solve.py`` (the
first launch), ``../gated_delta_net/triton_prefill.py`` (the caller).
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

from hyradix.kernels.gated_delta_rule.triton_solve import solve_kernel
from hyradix.kernels.triton_halves import ONE, dot, dot_for, scale_of, split
from hyradix.kernels.triton_support import ceil_div, launch, load32, power_of_two, store
from hyradix.kernels.triton_table import ChunkConfig, chunk_config

CHUNK = 64
LEAST_TILE = 32
"""Of d_k and d_v: products of 16 of either came out wrong on an H200 (Triton 3.6, 4 warps)."""
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunks:
    """How tokens fall into chunks; ``int32`` tensors on the device.

    table: ``[NC, 3]`` first token, tokens, slot of the save behind it or 0; in order, sequence by
    sequence; chunks without tokens are padding. offsets: ``[N+1]`` sequence i has chunks offsets[i]
    : offsets[i+1]. slots: ``[N]``; 0: it starts from nothing and leaves nothing. num_usual: how
    many sequences there are most of the time, where most of N are padding; 0: N.
    """

    table: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    num_usual: int = 0

    @property
    def num_expected(self) -> int:
        """Sequences that a configuration is chosen for."""
        return self.num_usual or self.slots.shape[0]


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
    """By token of the step: inputs (q, k unit and q scaled), what the first launch leaves.

    q, k, w, products: ``float16[2, ..]``, high and low numbers (``../triton_halves.py``).
    keys, solved: the same memory in the order that kernels take it, unbound once.
    """

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

        def halves(*shape: int) -> torch.Tensor:
            return torch.empty(2, max_tokens, *shape, dtype=torch.float16, device=device)

        self.q, self.k = (halves(num_k_heads, k_dim) for _ in "qk")
        self.v = empty(num_v_heads, v_dim)
        self.g, self.beta = (empty(num_v_heads) for _ in "gb")
        self.w, self.u = halves(num_v_heads, k_dim), empty(num_v_heads, v_dim)
        self.products = halves(num_v_heads, CHUNK)
        self.keys = *self.q.unbind(), *self.k.unbind()
        self.solved = *self.w.unbind(), self.u, *self.products.unbind()


def chunked_(
    chunks: Chunks,
    state: torch.Tensor,
    scratch: ChunkScratch,
    out: torch.Tensor,
    *,
    config: ChunkConfig | None = None,
) -> None:
    """From each sequence's slot: out ``[T, Hv, dv]``, the slot's state, the saves.

    state: ``float32[slots, Hv, dk, dv]``. scratch: q, k, v, g, beta of all tokens; beta becomes
    e^G (from the chunk's start to the token), g becomes e^(G_last - G). out: in the type of
    activations, each token's heads side by side.
    """
    is_exact, (dk, dv) = out.dtype == torch.float32, state.shape[2:]
    count = chunks.num_expected
    config = config or chunk_config(state.device, count, dk, dv, is_exact=is_exact)
    solve_(chunks, scratch, config, is_exact=is_exact)
    pass_(chunks, state, scratch, config, out, is_exact=is_exact)


def solve_(chunks: Chunks, scratch: ChunkScratch, config: ChunkConfig, *, is_exact: bool) -> None:
    """The first launch: w, u and products from q, k, v, g and beta, of which the last two change.

    is_exact: of products that are for outputs alone, too.
    """
    x = scratch
    (_, _, num_k_heads, dk), (_, num_v_heads, dv) = x.k.shape, x.v.shape
    all_k = power_of_two(dk, least=LEAST_TILE)
    launch(
        solve_kernel,
        (num_v_heads, chunks.table.shape[0]),  # neighbours have what stands side by side
        chunks.table, *x.keys, x.v, x.g, x.beta, *x.solved,
        num_v_heads, num_v_heads // num_k_heads, dk, dv, CHUNK, all_k, min(64, all_k),
        min(64, power_of_two(dv, least=LEAST_TILE)), CHUNK.bit_length() - 1, is_exact,
        num_warps=config.solve_warps,
    )  # fmt: skip


def pass_(
    chunks: Chunks,
    state: torch.Tensor,
    scratch: ChunkScratch,
    config: ChunkConfig,
    out: torch.Tensor,
    *,
    is_exact: bool,
) -> None:
    """The second: out, the slots' states, the saves.

    A chunk's numbers are asked for at once only where shared memory holds them twice.
    """
    x, (_, num_v_heads, dk, dv) = scratch, state.shape
    assert state.is_contiguous()
    assert out.stride()[1:] == (dv, 1)
    block_v = max(min(config.block_v, power_of_two(dv)), LEAST_TILE)
    stages = 1 if is_exact or dk > 128 else config.stages
    launch(
        _pass_kernel,
        (chunks.slots.shape[0] * num_v_heads * ceil_div(dv, block_v),),
        chunks.table, chunks.offsets, chunks.slots, state, *x.keys, x.beta, x.g, *x.solved, out,
        out.stride(0),
        num_v_heads, num_v_heads // x.k.shape[2], dk, dv, CHUNK, power_of_two(dk, least=LEAST_TILE),
        block_v, ceil_div(dv, block_v), is_exact, stages,
        num_warps=config.pass_warps,
    )  # fmt: skip


@triton.jit
def _pass_kernel(
    table, offsets, slots, all_states, q_high, q_low, k_high, k_low, all_grown, all_behind,
    w_high, w_low, all_u, products_high, products_low, out, out_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    HK: tl.constexpr = HV // RATIO
    sequence = tl.program_id(0) // (BLOCKS * HV)
    head = tl.program_id(0) // BLOCKS % HV
    slot = tl.load(slots + sequence).to(tl.int64)
    last_chunk = tl.load(offsets + sequence + 1)
    c, d = tl.arange(0, C), tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_k, in_v = (d < DK)[None, :], (column < DV)[None, :]
    in_state = (d < DK)[:, None] & in_v
    place = (head * DK + d[:, None]) * DV + column[None, :]
    of_w, of_key = (c * (HV * DK))[:, None] + d[None, :], (c * (HK * DK))[:, None] + d[None, :]
    of_value = (c * (HV * DV))[:, None] + column[None, :]
    of_out = (c * out_stride)[:, None] + head * DV + column[None, :]
    of_products = (c * (HV * C))[:, None] + c[None, :]
    own = all_states + slot * (HV * DK * DV) + place
    state = tl.load(own, mask=in_state & (slot != 0), other=0.0)  # padding starts from nothing
    for chunk in tl.range(tl.load(offsets + sequence), last_chunk, num_stages=STAGES):
        first = tl.load(table + 3 * chunk).to(tl.int64)
        count = tl.load(table + 3 * chunk + 1)
        save = tl.load(table + 3 * chunk + 2).to(tl.int64)
        is_token = c < count
        of_tokens, in_columns = is_token[:, None] & in_k, is_token[:, None] & in_v
        row = first * HV + head  # of the chunk's first token; 32 bits from there on
        key = (first * HK + head // RATIO) * DK
        grown = load32(all_grown + row + c * HV, is_token)
        behind = load32(all_behind + row + c * HV, is_token)
        kept = tl.load(all_grown + row + (count - 1) * HV)
        high = tl.load(w_high + row * DK + of_w, mask=of_tokens, other=0.0)
        low = tl.load(w_low + row * DK + of_w, mask=of_tokens, other=0.0)
        scale, by = scale_of(state)
        state_high, state_low = split(state * by)
        u = load32(all_u + row * DV + of_value, in_columns)
        u -= dot(high, low, state_high, state_low) * (scale * (1.0 / ONE))
        high = tl.load(q_high + key + of_key, mask=of_tokens, other=0.0)
        low = high
        if IS_EXACT:
            low = tl.load(q_low + key + of_key, mask=of_tokens, other=0.0)
        o = dot_for(high, low, state_high, state_low, IS_EXACT)
        o *= (grown * (scale * (1.0 / ONE)))[:, None]
        scale, by = scale_of(u)
        u *= by
        high = tl.load(products_high + row * C + of_products, mask=is_token[:, None], other=0.0)
        low = high
        if IS_EXACT:
            low = tl.load(products_low + row * C + of_products, mask=is_token[:, None], other=0.0)
        u_high, u_low = split(u)
        o += dot_for(high, low, u_high, u_low, IS_EXACT) * (scale * (1.0 / ONE))
        store(out + first * out_stride + of_out, o, in_columns)
        u_high, u_low = split(u * behind[:, None])
        high = tl.load(k_high + key + of_key, mask=of_tokens, other=0.0)
        low = tl.load(k_low + key + of_key, mask=of_tokens, other=0.0)
        added = dot(tl.trans(high), tl.trans(low), u_high, u_low) * (scale * (1.0 / ONE))
        state = state * kept + added
        if save != 0:
            tl.store(all_states + save * (HV * DK * DV) + place, state, mask=in_state)
    if slot != 0:
        tl.store(own, state, mask=in_state)

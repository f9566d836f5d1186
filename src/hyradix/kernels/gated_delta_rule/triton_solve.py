"""The gated delta rule over many tokens on the GPU, first half: every chunk solved by itself.

Owns: ``solve_kernel``. Does not know: states, the order of chunks.

One program is a chunk of up to 64 tokens and a value head: q k^T with its decays, T = (I + A)^-1,
W = T (beta e^G k), U = T (beta v). Heads of one key make k k^T each: a sixth of the work, and
registers for it through all of the rest are worth more.

Invariants:
- T by blocks, each from final ones (powers of A lose digits where keys repeat): of rows 2n as of n,
  T - T A' T with A' what is in a block of 2n and in none of n.
- Numbers of A, T, W and of A' T are bounded by those of unit keys and beta, since what a block of
  rows does to a key is no more than a contraction; so they are split without a scale.
- Sums of g are within a chunk and float64 in differences.
Read next: ``triton.py`` (the caller), ``../triton_halves.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import triton
import triton.language as tl

from hyradix.kernels.triton_halves import ONE, dot, dot_for, scale_of, split
from hyradix.kernels.triton_support import load32


@triton.jit
def solve_kernel(
    table, q_high, q_low, k_high, k_low, all_v, all_g, all_beta,
    w_high, w_low, all_u, products_high, products_low,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    ALL_K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    IS_EXACT: tl.constexpr,
):  # fmt: skip
    """``beta`` becomes e^G (from the chunk's start to the token), g e^(G_last - G)."""
    HK: tl.constexpr = HV // RATIO
    head = tl.program_id(0)
    first = tl.load(table + 3 * tl.program_id(1)).to(tl.int64)
    count = tl.load(table + 3 * tl.program_id(1) + 1)
    if count == 0:
        return
    c, d = tl.arange(0, C), tl.arange(0, ALL_K)
    is_token = c < count
    row, key = first * HV + head, (first * HK + head // RATIO) * DK
    gate, of_key = row + c * HV, (c * (HK * DK))[:, None]
    g = load32(all_g + gate, is_token).to(tl.float64)
    beta = load32(all_beta + gate, is_token)
    sums = tl.cumsum(g, 0)
    ratio = tl.where(c[:, None] >= c[None, :], sums[:, None] - sums[None, :], float("-inf"))
    ratio = tl.exp(ratio.to(tl.float32))
    grown = tl.exp(sums.to(tl.float32))
    behind = tl.exp((tl.sum(g, 0) - sums).to(tl.float32))
    tl.debug_barrier()  # g and beta are read by all before they are written
    tl.store(all_g + gate, behind, mask=is_token)
    tl.store(all_beta + gate, grown, mask=is_token)
    inside = is_token[:, None] & (d < DK)[None, :]
    high = tl.load(k_high + key + of_key + d[None, :], mask=inside, other=0.0)
    low = tl.load(k_low + key + of_key + d[None, :], mask=inside, other=0.0)
    q = tl.load(q_high + key + of_key + d[None, :], mask=inside, other=0.0)
    rest = q
    if IS_EXACT:
        rest = tl.load(q_low + key + of_key + d[None, :], mask=inside, other=0.0)
    products = dot_for(q, rest, tl.trans(high), tl.trans(low), IS_EXACT)
    product_high, product_low = split(products * ratio * (1.0 / ONE))
    place = row * C + (c * (HV * C))[:, None] + c[None, :]
    tl.store(products_high + place, product_high, mask=is_token[:, None])
    if IS_EXACT:
        tl.store(products_low + place, product_low, mask=is_token[:, None])
    system = dot(high, low, tl.trans(high), tl.trans(low)) * ratio
    system *= (beta * (1.0 / ONE))[:, None]
    system = tl.where(c[:, None] > c[None, :], system, 0.0)
    inverse = _inverse(system, C, LEVELS)
    left_high, left_low = split(inverse * (beta * grown)[None, :])
    for begin in range(0, DK, BK):
        part = begin + tl.arange(0, BK)
        in_k = is_token[:, None] & (part < DK)[None, :]
        key_high = tl.load(k_high + key + of_key + part[None, :], mask=in_k, other=0.0)
        key_low = tl.load(k_low + key + of_key + part[None, :], mask=in_k, other=0.0)
        key_high, key_low = split(dot(left_high, left_low, key_high, key_low) * (1.0 / ONE))
        w_place = row * DK + (c * (HV * DK))[:, None] + part[None, :]
        tl.store(w_high + w_place, key_high, mask=in_k)
        tl.store(w_low + w_place, key_low, mask=in_k)
    left_high, left_low = split(inverse * beta[None, :])
    for begin in range(0, DV, BV):
        column = begin + tl.arange(0, BV)
        in_v = is_token[:, None] & (column < DV)[None, :]
        v_place = row * DV + (c * (HV * DV))[:, None] + column[None, :]
        v = load32(all_v + v_place, in_v)
        scale, by = scale_of(v)
        v_high, v_low = split(v * by)
        u = dot(left_high, left_low, v_high, v_low) * (scale * (1.0 / ONE))
        tl.store(all_u + v_place, u, mask=in_v)


@triton.jit
def _inverse(system, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + system)^-1; both ONE times; system: below the diagonal only, C = 2^LEVELS rows."""
    c = tl.arange(0, C)
    row, column = c[:, None], c[None, :]
    inverse = tl.where(row == column, ONE, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for level in range(1, LEVELS):
        is_new = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        high, low = split(tl.where(is_new, system, 0.0))
        inverse_high, inverse_low = split(inverse)
        high, low = split(dot(high, low, inverse_high, inverse_low) * (1.0 / ONE))
        inverse -= dot(inverse_high, inverse_low, high, low) * (1.0 / ONE)
    return inverse

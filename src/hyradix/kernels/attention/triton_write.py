"""Before attention, in one launch: norms and rotation of q and k, K and V into their slots.

Owns: ``write_kv``. Does not know: which columns a query sees.
Invariant: tokens whose write slot is 0 write nothing to the pools; their q is made all the same.
Read next: ``triton.py``; the readable twins: ``reference.attention``, ``rotary/reference.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.triton_support import (
    ceil_div,
    launch,
    load32,
    power_of_two,
    store,
    wait_for_previous,
)

_HEADS, _MANY_TOKENS = 4, 64
"""Heads of a program, where tokens are so many that there are programs enough."""


def write_kv(
    projected: torch.Tensor,
    weights: AttentionWeights,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor | None,
    v_pool: torch.Tensor | None,
) -> torch.Tensor:
    """Fill q and the tokens' slots.

    Args:
        projected: ``[T, (2 H + 2 Hkv) D]``: q of all heads, k, v, gates of all heads (if any);
            ``[T, 2 H D]`` (q, gates) where the pools are None. positions, write_slots:
            ``int32[T]``. q: ``[T, H, D]``. k_pool, v_pool: ``[slots, Hkv, D]``. weights: on the
            device.

    Returns: q.
    """
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    assert projected.stride(1) == 1
    assert q.is_contiguous()
    has_kv = k_pool is not None and v_pool is not None
    if has_kv:
        assert k_pool.stride()[1:] == v_pool.stride()[1:] == (dim, 1)
    tokens = projected.shape[0]
    together = _HEADS if tokens >= _MANY_TOKENS else 1
    parts = (ceil_div(heads, together), ceil_div(kv_heads * has_kv, together))
    launch(
        _write_kernel,
        (tokens * sum(parts),),  # neighbours have what stands side by side
        projected, projected.stride(0), weights.q_norm, weights.k_norm, weights.eps,
        weights.angles, positions, write_slots, q, k_pool if has_kv else q, v_pool if has_kv else q,
        k_pool.stride(0) if has_kv else 0, v_pool.stride(0) if has_kv else 0,
        heads, kv_heads, dim, weights.angles.shape[2], power_of_two(dim), weights.has_norm,
        together, *parts,
        num_warps=together, is_chained=True,
    )  # fmt: skip
    return q


@triton.jit
def _write_kernel(
    projected, projected_stride, q_norm, k_norm, eps, angles, positions, write_slots,
    q, k_pool, v_pool, k_stride, v_stride,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    HAS_NORM: tl.constexpr, TOGETHER: tl.constexpr, Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """TOGETHER heads of one token: of q first, then of k (whose programs copy v too)."""
    part = tl.program_id(0) % (Q_PARTS + K_PARTS)
    token = (tl.program_id(0) // (Q_PARTS + K_PARTS)).to(tl.int64)
    x = projected + token * projected_stride
    angle = angles + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    h, d = tl.arange(0, TOGETHER)[:, None], tl.arange(0, BD)[None, :]
    wait_for_previous(CHAINED)
    if part < Q_PARTS:
        head = part * TOGETHER + h
        is_head = head < H
        rotated = _normed_rotated(x + head * D, is_head, q_norm, eps, angle, D, HALF, BD, HAS_NORM)
        store(q + (token * H + head) * D + d, rotated, is_head & (d < D))
        return
    slot = tl.load(write_slots + token).to(tl.int64)
    if slot == 0:
        return
    head = (part - Q_PARTS) * TOGETHER + h
    is_head = head < HKV
    x += H * D
    rotated = _normed_rotated(x + head * D, is_head, k_norm, eps, angle, D, HALF, BD, HAS_NORM)
    place, inside = head * D + d, is_head & (d < D)
    store(k_pool + slot * k_stride + place, rotated, inside)
    v = load32(x + (HKV + head) * D + d, inside)
    store(v_pool + slot * v_stride + place, v, inside)


@triton.jit
def _normed_rotated(
    x, is_head, norm, eps, angle, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads ``x`` [T, 1]: rms_norm (or the weight alone), then pairs (i, i + HALF) turned, those
    from 2 HALF on not."""
    d = tl.arange(0, BLOCK)[None, :]
    in_head, is_turned = d < D, d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    value = load32(x + d, is_head & in_head)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    own = value * scale * load32(norm + d, in_head)
    other = load32(x + partner, is_head & is_turned) * scale * load32(norm + partner, is_turned)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angle + i, mask=is_turned, other=1.0)
    sin = tl.load(angle + HALF + i, mask=is_turned, other=0.0)
    return own * cos + other * tl.where(d < HALF, -sin, sin)

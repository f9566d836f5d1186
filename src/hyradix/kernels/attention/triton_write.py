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
from hyradix.kernels.triton_support import launch, load32, power_of_two, store, wait_for_previous


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
    launch(
        _write_kernel,
        (projected.shape[0], heads + kv_heads * has_kv),
        projected, projected.stride(0), weights.q_norm, weights.k_norm, weights.eps,
        weights.angles, positions, write_slots, q, k_pool if has_kv else q, v_pool if has_kv else q,
        k_pool.stride(0) if has_kv else 0, v_pool.stride(0) if has_kv else 0,
        heads, kv_heads, dim, weights.angles.shape[2], power_of_two(dim), weights.has_norm,
        num_warps=1, is_chained=True,
    )  # fmt: skip
    return q


@triton.jit
def _write_kernel(
    projected, projected_stride, q_norm, k_norm, eps, angles, positions, write_slots,
    q, k_pool, v_pool, k_stride, v_stride,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    HAS_NORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Heads of q first, then of k (whose programs copy v too)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    x = projected + token * projected_stride
    angle = angles + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    d = tl.arange(0, BD)
    wait_for_previous(CHAINED)
    if head < H:
        rotated = _normed_rotated(x + head * D, q_norm, eps, angle, D, HALF, BD, HAS_NORM)
        store(q + (token * H + head) * D + d, rotated, d < D)
        return
    slot = tl.load(write_slots + token).to(tl.int64)
    if slot == 0:
        return
    rotated = _normed_rotated(x + head * D, k_norm, eps, angle, D, HALF, BD, HAS_NORM)
    place = (head - H) * D + d
    store(k_pool + slot * k_stride + place, rotated, d < D)
    v = load32(x + (HKV + head) * D + d, d < D)
    store(v_pool + slot * v_stride + place, v, d < D)


@triton.jit
def _normed_rotated(
    x, norm, eps, angle, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """rms_norm (or the weight alone), then pairs (i, i + HALF) turned, those from 2 HALF on not."""
    d = tl.arange(0, BLOCK)
    in_head, is_turned = d < D, d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    value = load32(x + d, in_head)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    own = value * scale * load32(norm + d, in_head)
    other = load32(x + partner, is_turned) * scale * load32(norm + partner, is_turned)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angle + i, mask=is_turned, other=1.0)
    sin = tl.load(angle + HALF + i, mask=is_turned, other=0.0)
    return own * cos + other * tl.where(d < HALF, -sin, sin)

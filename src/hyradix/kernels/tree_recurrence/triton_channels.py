"""What a verify needs where every channel of k decays by itself (KDA): decayed vectors, products.

Owns: ``ChannelScratch`` and ``channel_products_``. Does not know: states, u, outputs.

A position P is the sum of g from the end of the log on: of a node the sum along its path, of a log
row minus the sum of what follows it, of the base minus the whole log. The factor from j to i is
e^(P_i - P_j), by channel; a product of two vectors takes it inside the sum over channels, which no
matrix unit can do.

Invariants: P is float64; the mask comes before the exponential, no factor exceeds 1.
Source: DESIGN section 6.1. Read next: ``triton_verify.py``; ``masked._products`` is the twin.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import ceil_div, launch, load32, power_of_two

_BLOCK = 16
_CHANNELS = 32


class ChannelScratch:
    """For ``max_trees`` trees of T nodes behind R rows; layers use it in turn.

    positions: ``float64[trees, Hv, R+T, K]``. k, q: ``[trees, Hv, T, K]``, decayed from the base.
    k_products, q_products: ``[trees, Hv, T, R+T]``, 0 where j is no ancestor.
    """

    def __init__(
        self,
        max_trees: int,
        num_nodes: int,
        num_log_rows: int,
        num_v_heads: int,
        k_dim: int,
        device: torch.device,
    ) -> None:
        lead = (max_trees, num_v_heads)
        every = num_log_rows + num_nodes
        self.positions = torch.empty(*lead, every, k_dim, dtype=torch.float64, device=device)
        self.k, self.q = (torch.empty(*lead, num_nodes, k_dim, device=device) for _ in "kq")
        self.k_products, self.q_products = (
            torch.empty(*lead, num_nodes, every, device=device) for _ in "kq"
        )


def channel_products_(
    first_token: torch.Tensor,
    num_nodes: torch.Tensor,
    rows: torch.Tensor,
    num_log_rows: torch.Tensor,
    ancestors: torch.Tensor,
    spec: SpecLayer,
    q: torch.Tensor,
    scratch: ChannelScratch,
) -> None:
    """Fill ``scratch``. The tensors as in ``DeviceTrees``; q: ``[tokens, Hk, K]``, scaled."""
    num_trees, nodes = ancestors.shape
    num_v_heads, dk = scratch.k.shape[1], scratch.k.shape[3]
    ratio, capacity = num_v_heads // spec.k.shape[2], spec.num_log_rows
    assert scratch.k.shape[2] == nodes
    assert scratch.positions.shape[2] == capacity + nodes
    launch(
        _positions_kernel,
        (num_trees, num_v_heads, ceil_div(dk, _CHANNELS)),
        first_token, num_nodes, rows, num_log_rows, ancestors, spec.k, spec.k.stride(0), spec.g,
        spec.g.stride(0), q, scratch.positions, scratch.k, scratch.q,
        nodes, capacity, num_v_heads, ratio, dk, power_of_two(nodes), _CHANNELS,
        num_warps=2,
    )  # fmt: skip
    blocks = ceil_div(nodes, _BLOCK)
    launch(
        _products_kernel,
        (num_trees * num_v_heads, blocks, ceil_div(capacity + nodes, _BLOCK)),
        first_token, num_nodes, rows, num_log_rows, ancestors, spec.k, spec.k.stride(0), q,
        scratch.positions, scratch.k_products, scratch.q_products,
        nodes, capacity, num_v_heads, ratio, dk, _BLOCK,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _positions_kernel(
    first_token, num_nodes, rows, num_log_rows, ancestors, all_k, k_stride, all_g, g_stride, all_q,
    positions, decayed_k, decayed_q,
    T: tl.constexpr, R: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    HK: tl.constexpr = HV // RATIO
    tree, head = tl.program_id(0), tl.program_id(1)
    size = tl.load(num_nodes + tree)
    if size == 0:
        return
    count = tl.load(num_log_rows + tree)
    row = tl.load(rows + tree).to(tl.int64)
    t, d = tl.arange(0, BT), tl.program_id(2) * BD + tl.arange(0, BD)
    is_node, in_k = t < size, d < DK
    inside = is_node[:, None] & in_k[None, :]
    g = all_g + row * g_stride + head * DK + d
    positions += (tree * HV + head).to(tl.int64) * ((R + T) * DK)
    whole = tl.zeros([BD], tl.float64)
    for i in range(count):
        j = count - 1 - i
        tl.store(positions + j * DK + d, -whole, mask=in_k)
        whole += load32(g + j * (HV * DK), in_k).to(tl.float64)
    path = tl.load(ancestors + tree * T + t, mask=is_node, other=0)
    sums = tl.zeros([BT, BD], tl.float64)
    for j in range(size):
        on_path = ((path >> j) & 1).to(tl.float64)
        sums += on_path[:, None] * load32(g + (R + j) * (HV * DK), in_k).to(tl.float64)[None, :]
    tl.store(positions + (R + t)[:, None] * DK + d[None, :], sums, mask=inside)
    factor = tl.exp((sums + whole[None, :]).to(tl.float32))
    k_place = all_k + row * k_stride + head // RATIO * DK
    k = load32(k_place + (R + t)[:, None] * (HK * DK) + d[None, :], inside)
    token = (tl.load(first_token + tree) + t).to(tl.int64)
    q = load32(all_q + (token * HK + head // RATIO)[:, None] * DK + d[None, :], inside)
    place = ((tree * HV + head).to(tl.int64) * T + t)[:, None] * DK + d[None, :]
    tl.store(decayed_k + place, k * factor, mask=inside)
    tl.store(decayed_q + place, q * factor, mask=inside)


@triton.jit
def _products_kernel(
    first_token, num_nodes, rows, num_log_rows, ancestors, all_k, k_stride, all_q,
    positions, k_products, q_products,
    T: tl.constexpr, R: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """B nodes times B of (log rows, then nodes)."""
    HK: tl.constexpr = HV // RATIO
    tree, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    size = tl.load(num_nodes + tree)
    t, j = tl.program_id(1) * B + tl.arange(0, B), tl.program_id(2) * B + tl.arange(0, B)
    if tl.program_id(1) * B >= size:
        return
    count = tl.load(num_log_rows + tree)
    path = tl.load(ancestors + tree * T + t, mask=t < size, other=0)
    shift = tl.maximum(j - R, 0).to(tl.int64)
    on_path = (((path[:, None] >> shift[None, :]) & 1) != 0) & (j >= R)[None, :]
    is_row = (t < size)[:, None] & (j < count)[None, :]
    is_seen = on_path | (is_row & (j < R)[None, :])
    is_key = (j < count) | ((j >= R) & (j < R + size))
    token = (tl.load(first_token + tree) + t).to(tl.int64)
    all_k += tl.load(rows + tree).to(tl.int64) * k_stride + head // RATIO * DK
    q_place = all_q + (token * HK + head // RATIO) * DK
    k_place, key_place = all_k + (R + t) * (HK * DK), all_k + j * (HK * DK)
    positions += (tree * HV + head).to(tl.int64) * ((R + T) * DK)
    k_total, q_total = tl.zeros([B, B], tl.float32), tl.zeros([B, B], tl.float32)
    for d in range(DK):
        own = tl.load(positions + (R + t) * DK + d, mask=t < size, other=0.0)
        other = tl.load(positions + j * DK + d, mask=is_key, other=0.0)
        behind = tl.where(is_seen, own[:, None] - other[None, :], float("-inf")).to(tl.float32)
        weighted = tl.exp(behind) * load32(key_place + d, is_key)[None, :]
        k_total += load32(k_place + d, t < size)[:, None] * weighted
        q_total += load32(q_place + d, t < size)[:, None] * weighted
    place = ((tree * HV + head).to(tl.int64) * T + t)[:, None] * (R + T) + j[None, :]
    inside = (t < size)[:, None] & (j < R + T)[None, :]
    tl.store(k_products + place, k_total, mask=inside)
    tl.store(q_products + place, q_total, mask=inside)

"""All nodes of draft trees at once on the GPU: the masked form, log rows as ancestors.

Owns: ``verify_nodes_``, one launch a layer; ``DeviceTrees``, what a step's trees are on the device.
Does not know: convolution, gates, norms (a family's own kernels), who is accepted.

A program is one (tree, value head, block of d_v columns). Nodes' v stand in the u rows when it
begins and are u when it ends: a program reads and writes its own columns only.

Invariants:
- The base and the valid log rows are only read; what is not a node is neither read nor written.
- u goes through products of three tf32 passes (near float32), outputs through
  ``output_precision``.
- Sums of g are float64, ratios only, masked before the exponential: no factor exceeds 1.
- A node is solved once, in the sweep of its depth.
Source: DESIGN section 6.1. Read next: ``masked.py`` (the readable twin).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hyradix.kernels.memory import upload
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_channels import ChannelScratch, channel_products_
from hyradix.kernels.triton_support import ceil_div, launch, load32, output_precision, power_of_two
from hyradix.kernels.triton_table import VerifyConfig, verify_config

MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """N trees of at most T nodes; ``int32`` tensors on the device.

    first_token, num_nodes (0: padding), slots, rows, num_log_rows: ``[N]``, as in ``RaggedTrees``.
    taps: ``[N, T, K]``. depths: ``[N, T]``. ancestors: ``int64[N, T]``, bit j: node j is on the
    path, a node's own bit included; 0 where there is no node.
    """

    first_token: torch.Tensor
    num_nodes: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    num_log_rows: torch.Tensor
    taps: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def of(
        cls, trees: RaggedTrees, num_nodes: int, device: torch.device, *, padded_to: int = 0
    ) -> DeviceTrees:
        """Padded copies: to ``num_nodes`` T nodes and so many trees."""
        assert num_nodes <= MAX_NODES
        flat, count = trees.trees, max(trees.trees.num_trees, padded_to)
        sizes = np.diff(flat.cu_nodes)
        tree = np.repeat(np.arange(len(sizes)), sizes)
        node = np.arange(len(tree)) - np.repeat(flat.cu_nodes[:-1], sizes)
        bits = np.zeros(len(tree), np.uint64)
        owners = np.repeat(np.arange(len(tree)), np.diff(flat.path_offsets))
        np.bitwise_or.at(bits, owners, np.uint64(1) << flat.path_nodes.astype(np.uint64))

        def by_tree(x: np.ndarray) -> torch.Tensor:
            padded = np.zeros((count, *x.shape[1:]), np.int32)
            padded[: len(x)] = x
            return upload(padded, device)

        def by_node(x: np.ndarray, dtype: type) -> torch.Tensor:
            padded = np.zeros((count, num_nodes, *x.shape[1:]), dtype)
            padded[tree, node] = x
            return upload(padded, device)

        numbers = (trees.first_token, sizes, trees.slots, trees.rows, trees.num_log_rows)
        return cls(
            *map(by_tree, numbers),
            by_node(trees.taps, np.int32),
            by_node(flat.depths, np.int32),
            by_node(bits.view(np.int64), np.int64),
        )


class TreeScratch:
    """What stands between the kernels of one layer, by token of the step; layers use it in turn."""

    def __init__(
        self,
        max_tokens: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device,
    ) -> None:
        self.q = torch.empty(max_tokens, num_k_heads, k_dim, device=device)
        self.beta = torch.empty(max_tokens, num_v_heads, device=device)
        self.o = torch.empty(max_tokens, num_v_heads, v_dim, device=device)


def verify_nodes_(
    rule: Rule,
    trees: DeviceTrees,
    state: torch.Tensor,
    spec: SpecLayer,
    scratch: TreeScratch,
    dtype: torch.dtype,
    *,
    channels: ChannelScratch | None = None,
    config: VerifyConfig | None = None,
) -> None:
    """``scratch.o`` and the nodes' u of one layer.

    Args: state ``float32[slots, Hv, K, V]``. spec: mode ``log``; the nodes' rows hold k, v (in
    place of u) and g. scratch: q (scaled) and beta of the nodes. dtype: of activations. channels:
    where the rule decays by channel; two more launches fill it.
    """
    assert rule.has_channel_decay == (channels is not None)
    _, num_v_heads, dk, dv = state.shape
    assert state.is_contiguous()
    num_trees, num_nodes = trees.depths.shape
    config = config or verify_config(state.device, num_nodes)
    block_v = max(min(config.block_v, power_of_two(dv)), 16)
    block_k = min(config.block_k, power_of_two(dk, least=16))
    blocks = ceil_div(dv, block_v)
    if channels is not None:
        channel_products_(
            trees.first_token, trees.num_nodes, trees.rows, trees.num_log_rows, trees.ancestors,
            spec, scratch.q, channels,
        )  # fmt: skip
        ready = (channels.k, channels.q, channels.k_products, channels.q_products)
    else:
        ready = (scratch.q,) * 4
    launch(
        _verify_kernel,
        (num_trees * num_v_heads * blocks,),
        trees.first_token, trees.num_nodes, trees.slots, trees.rows, trees.num_log_rows,
        trees.depths, trees.ancestors, state, spec.k, spec.k.stride(0), spec.u, spec.u.stride(0),
        spec.g, spec.g.stride(0), scratch.q, scratch.beta, scratch.o, *ready,
        num_nodes, spec.num_log_rows, num_v_heads, num_v_heads // spec.k.shape[2], dk, dv,
        power_of_two(num_nodes, least=16), power_of_two(spec.num_log_rows, least=16),
        block_k, block_v, blocks, config.stages, rule.has_delta,
        rule.has_channel_decay, output_precision(dtype),
        num_warps=config.num_warps,
    )  # fmt: skip


@triton.jit
def _verify_kernel(
    first_token, num_nodes, slots, rows, num_log_rows, depths, ancestors, state,
    all_k, k_stride, all_u, u_stride, all_g, g_stride, all_q, all_beta, all_o,
    decayed_k, decayed_q, k_products, q_products,
    T: tl.constexpr, R: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, HAS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HK: tl.constexpr = HV // RATIO
    tree = tl.program_id(0) // (BLOCKS * HV)
    head = tl.program_id(0) // BLOCKS % HV
    size = tl.load(num_nodes + tree)
    if size == 0:
        return
    slot = tl.load(slots + tree).to(tl.int64)
    row = tl.load(rows + tree).to(tl.int64)
    count = tl.load(num_log_rows + tree)
    all_k += row * k_stride + head // RATIO * DK
    all_u += row * u_stride + head * DV
    all_g += row * g_stride + head
    t, r = tl.arange(0, BT), tl.arange(0, BR)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    is_node, is_row, in_v = t < size, r < count, column < DV
    token = (tl.load(first_token + tree) + t).to(tl.int64)
    depth = tl.load(depths + tree * T + t, mask=is_node, other=-1)
    path = tl.load(ancestors + tree * T + t, mask=is_node, other=0)
    on_path = ((path[:, None] >> t[None, :].to(tl.int64)) & 1) != 0

    if not BY_CHANNEL:
        g = load32(all_g + (R + t) * HV, is_node).to(tl.float64)
        row_g = load32(all_g + r * HV, is_row).to(tl.float64)
        sums = tl.sum(tl.where(on_path, g[None, :], 0.0), 1)  # from the root on, itself included
        after = tl.sum(tl.where(r[None, :] > r[:, None], row_g[None, :], 0.0), 1)
        from_base = tl.exp((sums + tl.sum(row_g, 0)).to(tl.float32))
        from_row = tl.where(is_row[None, :], sums[:, None] + after[None, :], float("-inf"))
        from_node = tl.where(on_path, sums[:, None] - sums[None, :], float("-inf"))
        from_row, from_node = tl.exp(from_row.to(tl.float32)), tl.exp(from_node.to(tl.float32))
    inside_v = is_node[:, None] & in_v[None, :]
    row_inside = is_row[:, None] & in_v[None, :]
    state += (slot * HV + head) * (DK * DV)
    all_q += (token * HK + head // RATIO)[:, None] * DK
    k_base, q_base = tl.zeros([BT, BV], tl.float32), tl.zeros([BT, BV], tl.float32)
    k_rows, q_rows = tl.zeros([BT, BR], tl.float32), tl.zeros([BT, BR], tl.float32)
    k_nodes, q_nodes = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for first in tl.range(0, DK, BK, num_stages=STAGES):
        d = first + tl.arange(0, BK)
        in_k = d < DK
        inside = is_node[:, None] & in_k[None, :]
        base = load32(state + d[:, None] * DV + column[None, :], in_k[:, None] & in_v[None, :])
        if BY_CHANNEL:
            place = ((tree * HV + head).to(tl.int64) * T + t)[:, None] * DK + d[None, :]
            k, q = load32(decayed_k + place, inside), load32(decayed_q + place, inside)
        else:
            k = load32(all_k + (R + t)[:, None] * (HK * DK) + d[None, :], inside)
            q = load32(all_q + d[None, :], inside)
        if HAS_DELTA:
            k_base = tl.dot(k, base, k_base, input_precision="tf32x3")
        q_base = tl.dot(q, base, q_base, input_precision=PRECISION)
        if not BY_CHANNEL:
            row_k = load32(
                all_k + r[:, None] * (HK * DK) + d[None, :], is_row[:, None] & in_k[None, :]
            )
            if HAS_DELTA:
                k_rows = tl.dot(k, tl.trans(row_k), k_rows, input_precision="tf32x3")
                k_nodes = tl.dot(k, tl.trans(k), k_nodes, input_precision="tf32x3")
            q_rows = tl.dot(q, tl.trans(row_k), q_rows, input_precision=PRECISION)
            q_nodes = tl.dot(q, tl.trans(k), q_nodes, input_precision=PRECISION)
    if BY_CHANNEL:  # decays are inside all of them
        place = ((tree * HV + head).to(tl.int64) * T + t)[:, None] * (R + T)
        of_rows, of_nodes = place + r[None, :], place + R + t[None, :]
        rows_inside = is_node[:, None] & is_row[None, :]
        nodes_inside = is_node[:, None] & is_node[None, :]
        k_rows = load32(k_products + of_rows, rows_inside)
        q_rows = load32(q_products + of_rows, rows_inside)
        k_nodes = load32(k_products + of_nodes, nodes_inside)
        q_nodes = load32(q_products + of_nodes, nodes_inside)
    else:
        k_base, q_base = k_base * from_base[:, None], q_base * from_base[:, None]
        k_rows, q_rows = k_rows * from_row, q_rows * from_row
        k_nodes, q_nodes = k_nodes * from_node, q_nodes * from_node

    row_u = load32(all_u + r[:, None] * (HV * DV) + column[None, :], row_inside)
    u_place = all_u + (R + t)[:, None] * (HV * DV) + column[None, :]
    beta = tl.load(all_beta + token * HV + head, mask=is_node, other=0.0)[:, None]
    u = beta * load32(u_place, inside_v)
    if HAS_DELTA:
        read = tl.dot(k_rows, row_u, k_base, input_precision="tf32x3")
        right = u - beta * read
        system = tl.where(t[:, None] > t[None, :], k_nodes * beta, 0.0)
        u = tl.where((depth == 0)[:, None], right, 0.0)
        for sweep in range(1, tl.max(depth, 0) + 1):
            solved = right - tl.dot(system, u, input_precision="tf32x3")
            u = tl.where((depth == sweep)[:, None], solved, u)
    tl.store(u_place, u, mask=inside_v)

    o = tl.dot(q_rows, row_u, q_base, input_precision=PRECISION)
    o = tl.dot(q_nodes, u, o, input_precision=PRECISION)
    o_place = all_o + (token * HV + head)[:, None] * DV + column[None, :]
    tl.store(o_place, o, mask=inside_v)

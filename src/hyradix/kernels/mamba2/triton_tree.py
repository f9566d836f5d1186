"""Mamba2 over draft trees on the GPU: convolution and time steps, the verify, skip and gated norm.

Owns: ``mix_trees_``, ``Mamba2TreeScratch``, and which of the draft buffers each launch fills. Does
not know: acceptance.

Invariants:
- State and window pools are only read; of ``spec`` the nodes' rows and columns are written.
- What is no node is neither read nor written, its row of ``out`` apart.
Read next: ``tree_reference.py`` (the readable twin), ``../tree_recurrence/triton_verify.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.causal_conv.triton_tree import conv_trees_
from hyradix.kernels.mamba2.triton import DeviceMamba2, finish_, time_steps_
from hyradix.kernels.tree_recurrence.rules import MAMBA2
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch, verify_nodes_
from hyradix.kernels.triton_support import launch, power_of_two, store
from hyradix.kernels.triton_table import VerifyConfig


class Mamba2TreeScratch(TreeScratch):
    """``TreeScratch``; by token too: what is convolved, g."""

    def __init__(
        self,
        max_tokens: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device,
    ) -> None:
        super().__init__(max_tokens, num_k_heads, num_v_heads, k_dim, v_dim, device)
        channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim
        self.mixed = torch.empty(max_tokens, channels, device=device)
        self.g = torch.empty(max_tokens, num_v_heads, device=device)


def mix_trees_(
    projected: torch.Tensor,
    weights: DeviceMamba2,
    trees: DeviceTrees,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    spec: SpecLayer,
    scratch: Mamba2TreeScratch,
    out: torch.Tensor,
    *,
    config: VerifyConfig | None = None,
) -> torch.Tensor:
    """Fill the rows of ``out`` ``[tokens, Hv dv]`` that are nodes, from mode ``log``.

    projected: ``[tokens, C + Hv dv + Hv]``. Rows of out that are no nodes get what their tokens'
    scratch gives: they are padding. Raises nothing; reads nothing of the host.
    """
    tokens, (_, num_v_heads, dk, dv) = projected.shape[0], state.shape
    num_trees, num_nodes = trees.depths.shape
    hk, x = weights.num_k_heads, scratch
    conv_trees_(projected, weights.conv, weights.conv_bias, trees, conv_state, spec, x.mixed)
    time_steps_(projected, weights, state, x.g, x.beta)
    launch(
        _rows_kernel,
        (num_trees * num_nodes, hk),
        trees.first_token, trees.num_nodes, trees.rows, x.mixed, x.g, x.q,
        spec.k, spec.k.stride(0), spec.u, spec.u.stride(0), spec.g, spec.g.stride(0),
        x.mixed.shape[1], num_nodes, spec.num_log_rows, hk, num_v_heads // hk, dk, dv,
        power_of_two(dk), power_of_two(dv),
        num_warps=1,
    )  # fmt: skip
    verify_nodes_(MAMBA2, trees, state, spec, scratch, projected.dtype, config=config)
    finish_(x.o[:tokens], x.mixed[:tokens], projected, weights, out)
    return out


@triton.jit
def _rows_kernel(
    first_token, num_nodes, rows, mixed, node_g, all_q, all_k, k_stride, all_u, u_stride,
    all_g, g_stride,
    CHANNELS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, HK: tl.constexpr,
    RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One node and key head: q to the scratch; k, and v and g of its value heads, to the rows."""
    HV: tl.constexpr = HK * RATIO
    tree, node = tl.program_id(0) // T, tl.program_id(0) % T
    head = tl.program_id(1)
    if node >= tl.load(num_nodes + tree):
        return
    token = tl.load(first_token + tree).to(tl.int64) + node
    row = tl.load(rows + tree).to(tl.int64)
    x = mixed + token * CHANNELS
    d, c = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < DK, c < DV
    q = tl.load(x + head * DK + d, mask=in_k)
    store(all_q + (token * HK + head) * DK + d, q, in_k)
    k = tl.load(x + (HK + head) * DK + d, mask=in_k)
    store(all_k + row * k_stride + ((R + node) * HK + head) * DK + d, k, in_k)
    for i in range(RATIO):
        v_head = head * RATIO + i
        v = tl.load(x + 2 * HK * DK + v_head * DV + c, mask=in_v)
        store(all_u + row * u_stride + ((R + node) * HV + v_head) * DV + c, v, in_v)
        g = tl.load(node_g + token * HV + v_head)
        tl.store(all_g + row * g_stride + (R + node) * HV + v_head, g)

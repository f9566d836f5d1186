"""The short convolution over draft trees on the GPU: windows by taps, raw columns kept.

Owns: ``conv_trees_`` for families without a fused one. Does not know: gates, the verify.

Invariants:
- Windows and log columns are only read; of the draft buffers the nodes' columns are written.
- A node's earlier columns are the step's own projections, log columns or the base's window: nothing
  that this launch writes is read by it.
- What is no node (padding of a tree, trees of no nodes) is neither read nor written.
Read next: ``tree.py`` (the layout), ``../kda/triton_tree.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from hyradix.kernels.triton_support import ceil_div, launch, load32, silu, store

_BLOCK = 256


def conv_trees_(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    trees: DeviceTrees,
    conv_state: torch.Tensor,
    spec: SpecLayer,
    out: torch.Tensor,
) -> torch.Tensor:
    """out ``[tokens, C]`` = silu(convolution) at the tokens that are nodes; the first C columns of
    ``projected`` are read, and become the nodes' columns of ``spec``.

    weight: ``float32[K, C]``. bias: ``float32[C]``. conv_state: ``[slots, K-1, C]``.
    """
    num_trees, num_nodes, width = trees.taps.shape
    channels = conv_state.shape[2]
    assert projected.stride(1) == out.stride(1) == 1
    assert conv_state.is_contiguous()
    assert weight.is_contiguous()
    launch(
        _conv_kernel,
        (num_trees * num_nodes, ceil_div(channels, _BLOCK)),
        projected, projected.stride(0), weight, weight if bias is None else bias,
        trees.first_token, trees.num_nodes, trees.slots, trees.rows, trees.taps, conv_state,
        spec.conv, spec.conv.stride(0), out, out.stride(0),
        channels, num_nodes, spec.first_node, width, bias is not None, _BLOCK,
        num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    projected, stride, weight, bias, first_token, num_nodes, slots, rows, taps, conv_state,
    columns, columns_stride, out, out_stride,
    C: tl.constexpr, T: tl.constexpr, FIRST_NODE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One node and block of channels; taps are oldest first, the node's own last."""
    tree, node = tl.program_id(0) // T, tl.program_id(0) % T
    if node >= tl.load(num_nodes + tree):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    root = tl.load(first_token + tree).to(tl.int64)
    step = projected + root * stride + c
    window = conv_state + tl.load(slots + tree).to(tl.int64) * ((WIDTH - 1) * C) + c
    columns += tl.load(rows + tree).to(tl.int64) * columns_stride + c
    taps += (tree * T + node) * WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += load32(bias + c, mask)
    for j in tl.static_range(WIDTH):
        tap = tl.load(taps + j)
        other = tap - FIRST_NODE
        value = load32(step + other * stride, mask & (other >= 0))
        value += load32(columns + tap * C, mask & (tap >= 0) & (other < 0))
        value += load32(window + (-1 - tap) * C, mask & (tap < 0))
        total += value * load32(weight + j * C + c, mask)
        if j == WIDTH - 1:
            store(columns + (FIRST_NODE + node) * C, value, mask)
    store(out + (root + node) * out_stride + c, silu(total), mask)

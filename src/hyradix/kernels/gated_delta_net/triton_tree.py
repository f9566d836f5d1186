"""A gated delta net over draft trees on the GPU: convolution and gates, the verify, the norm.

Owns: ``mix_trees_``, and which of the draft buffers each kernel fills. Does not know: acceptance.

Invariants:
- State and window pools are only read; of ``spec`` the nodes' rows and columns are written.
- A node's earlier columns are the step's own projections, log columns or the base's window: nothing
  that this launch writes is read by it.
Read next: ``tree_reference.py`` (the readable twin), ``../tree_recurrence/triton_verify.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, gates, unit
from hyradix.kernels.rms_norm.triton import gated_rms_norm
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch, verify_nodes_
from hyradix.kernels.triton_support import launch, load32, power_of_two, silu, store
from hyradix.kernels.triton_table import VerifyConfig


def mix_trees_(
    projected: torch.Tensor,
    weights: PackedMixer,
    trees: DeviceTrees,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    spec: SpecLayer,
    scratch: TreeScratch,
    out: torch.Tensor,
    *,
    config: VerifyConfig | None = None,
) -> torch.Tensor:
    """Fill the rows of ``out`` ``[tokens, Hv dv]`` that are nodes, from mode ``log``.

    projected: ``[tokens, C + Hv dv + 2 Hv]``. Rows of out that are no nodes get what their tokens'
    scratch gives: they are padding. Raises nothing; reads nothing of the host.
    """
    channels = conv_state.shape[2]
    _, num_v_heads, dk, dv = state.shape
    num_trees, num_nodes = trees.depths.shape
    assert projected.stride(1) == 1
    assert conv_state.is_contiguous()
    launch(
        _prepare_kernel,
        (num_trees * num_nodes, weights.num_k_heads),
        projected, projected.stride(0), weights.conv, weights.decay_rate, weights.dt_bias,
        trees.first_token, trees.num_nodes, trees.slots, trees.rows, trees.taps, conv_state,
        spec.conv, spec.conv.stride(0), spec.k, spec.k.stride(0), spec.u, spec.u.stride(0),
        spec.g, spec.g.stride(0), scratch.q, scratch.beta,
        channels, num_nodes, spec.num_log_rows, spec.first_node, weights.num_k_heads,
        num_v_heads // weights.num_k_heads, dk, dv, trees.taps.shape[2], power_of_two(dk),
        power_of_two(dv),
        num_warps=1,
    )  # fmt: skip
    verify_nodes_(GDN, trees, state, spec, scratch, projected.dtype, config=config)
    tokens = projected.shape[0]
    z = projected[:, channels : channels + num_v_heads * dv].unflatten(1, (num_v_heads, dv))
    o = scratch.o[:tokens]
    gated_rms_norm(o, z, weights.norm, weights.eps, out.unflatten(1, (num_v_heads, dv)))
    return out


@triton.jit
def _prepare_kernel(
    projected, projected_stride, conv_w, decay_rate, dt_bias, first_token, num_nodes, slots, rows,
    taps, conv_state, conv, conv_stride, all_k, k_stride, all_u, u_stride, all_g, g_stride,
    all_q, all_beta,
    CHANNELS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, FIRST_NODE: tl.constexpr,
    HK: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One node and key head: q, k, and v, g, beta of its RATIO value heads; raw columns."""
    HV: tl.constexpr = HK * RATIO
    tree, node = tl.program_id(0) // T, tl.program_id(0) % T
    head = tl.program_id(1)
    if node >= tl.load(num_nodes + tree):
        return
    slot = tl.load(slots + tree).to(tl.int64)
    row = tl.load(rows + tree).to(tl.int64)
    root = tl.load(first_token + tree).to(tl.int64)
    token = root + node
    step = projected + root * projected_stride
    window = conv_state + slot * ((WIDTH - 1) * CHANNELS)
    conv += row * conv_stride
    taps += (tree * T + node) * WIDTH
    column = conv + (FIRST_NODE + node) * CHANNELS
    d, c = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < DK, c < DV
    q = _convolved(step, projected_stride, window, conv, column, taps, conv_w, head * DK + d, in_k,
                   CHANNELS, FIRST_NODE, WIDTH)  # fmt: skip
    k = _convolved(step, projected_stride, window, conv, column, taps, conv_w,
                   (HK + head) * DK + d, in_k, CHANNELS, FIRST_NODE, WIDTH)  # fmt: skip
    store(all_q + (token * HK + head) * DK + d, unit(q) * (DK**-0.5), in_k)
    store(all_k + row * k_stride + ((R + node) * HK + head) * DK + d, unit(k), in_k)
    for i in tl.static_range(RATIO):
        v_head = head * RATIO + i
        v = _convolved(step, projected_stride, window, conv, column, taps, conv_w,
                       2 * HK * DK + v_head * DV + c, in_v, CHANNELS, FIRST_NODE,
                       WIDTH)  # fmt: skip
        x = step + node * projected_stride
        g, beta = gates(x, decay_rate, dt_bias, v_head, CHANNELS, HV, DV)
        store(all_u + row * u_stride + ((R + node) * HV + v_head) * DV + c, v, in_v)
        tl.store(all_g + row * g_stride + (R + node) * HV + v_head, g)
        tl.store(all_beta + token * HV + v_head, beta)


@triton.jit
def _convolved(
    step, step_stride, window, conv, own, taps, weight, channel, mask,
    CHANNELS: tl.constexpr, FIRST_NODE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """silu(convolution) by taps, oldest first, the node's own last, which is kept in ``own``."""
    total = channel * 0.0
    for j in tl.static_range(WIDTH):
        tap = tl.load(taps + j)
        node = tap - FIRST_NODE
        value = load32(step + node * step_stride + channel, mask & (node >= 0))
        value += load32(conv + tap * CHANNELS + channel, mask & (tap >= 0) & (node < 0))
        value += load32(window + (-1 - tap) * CHANNELS + channel, mask & (tap < 0))
        total += value * load32(weight + j * CHANNELS + channel, mask)
        if j == WIDTH - 1:
            store(own + channel, value, mask)
    return silu(total)

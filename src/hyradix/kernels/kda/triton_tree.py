"""Kimi delta attention over draft trees on the GPU: convolution and gates, the verify, the norm.

Owns: ``mix_trees_``, ``KdaTreeScratch``, and which of the draft buffers each launch fills. Does not
know: acceptance.

Invariants:
- State and window pools are only read; of ``spec`` the nodes' rows and columns are written.
- What is no node is neither read nor written, its row of ``out`` apart.
Read next: ``tree_reference.py`` (the readable twin), ``../tree_recurrence/triton_channels.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.causal_conv.triton_tree import conv_trees_
from hyradix.kernels.kda.triton import DeviceKda, finish_, gates_
from hyradix.kernels.tree_recurrence.rules import KDA
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_channels import ChannelScratch
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch, verify_nodes_
from hyradix.kernels.triton_support import launch, power_of_two, store
from hyradix.kernels.triton_table import VerifyConfig


class KdaTreeScratch(TreeScratch):
    """``TreeScratch``; by token too: what is convolved, g; by tree: what decays by channel."""

    def __init__(
        self,
        max_tokens: int,
        max_trees: int,
        num_nodes: int,
        num_log_rows: int,
        num_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device,
    ) -> None:
        """num_nodes: as ``DeviceTrees`` are padded; num_log_rows: R of the draft buffers."""
        super().__init__(max_tokens, num_heads, num_heads, k_dim, v_dim, device)
        self.mixed = torch.empty(max_tokens, num_heads * (2 * k_dim + v_dim), device=device)
        self.g = torch.empty(max_tokens, num_heads, k_dim, device=device)
        self.channels = ChannelScratch(max_trees, num_nodes, num_log_rows, num_heads, k_dim, device)


def mix_trees_(
    projected: torch.Tensor,
    forget: torch.Tensor,
    gate: torch.Tensor,
    weights: DeviceKda,
    trees: DeviceTrees,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    spec: SpecLayer,
    scratch: KdaTreeScratch,
    out: torch.Tensor,
    *,
    config: VerifyConfig | None = None,
) -> torch.Tensor:
    """Fill the rows of ``out`` ``[tokens, H dv]`` that are nodes, from mode ``log``.

    projected, forget, gate: as ``reference.mix``. Rows of out that are no nodes get what their
    tokens' scratch gives: they are padding. Raises nothing; reads nothing of the host.
    """
    tokens, (_, heads, dk, dv) = projected.shape[0], state.shape
    num_trees, num_nodes = trees.depths.shape
    x = scratch
    conv_trees_(projected, weights.conv, None, trees, conv_state, spec, x.mixed)
    gates_(x.mixed[:tokens], projected, forget, weights, state, x.g, x.beta)
    launch(
        _rows_kernel,
        (num_trees * num_nodes, heads),
        trees.first_token, trees.num_nodes, trees.rows, x.mixed, x.g, x.q,
        spec.k, spec.k.stride(0), spec.u, spec.u.stride(0), spec.g, spec.g.stride(0),
        num_nodes, spec.num_log_rows, heads, dk, dv, power_of_two(dk), power_of_two(dv),
        num_warps=1,
    )  # fmt: skip
    verify_nodes_(
        KDA, trees, state, spec, scratch, projected.dtype, channels=x.channels, config=config
    )
    finish_(x.o[:tokens], gate, weights, out)
    return out


@triton.jit
def _rows_kernel(
    first_token, num_nodes, rows, mixed, node_g, all_q, all_k, k_stride, all_u, u_stride,
    all_g, g_stride,
    T: tl.constexpr, R: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One node and head: q to the scratch; k, v and g to the rows."""
    tree, node = tl.program_id(0) // T, tl.program_id(0) % T
    head = tl.program_id(1)
    if node >= tl.load(num_nodes + tree):
        return
    token = tl.load(first_token + tree).to(tl.int64) + node
    row = tl.load(rows + tree).to(tl.int64)
    x = mixed + token * (H * (2 * DK + DV))
    d, c = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < DK, c < DV
    place = (token * H + head) * DK + d
    own = ((R + node) * H + head) * DK + d
    store(all_q + place, tl.load(x + head * DK + d, mask=in_k), in_k)
    store(all_k + row * k_stride + own, tl.load(x + (H + head) * DK + d, mask=in_k), in_k)
    store(all_g + row * g_stride + own, tl.load(node_g + place, mask=in_k), in_k)
    v = tl.load(x + 2 * H * DK + head * DV + c, mask=in_v)
    store(all_u + row * u_stride + ((R + node) * H + head) * DV + c, v, in_v)

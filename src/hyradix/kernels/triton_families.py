"""What each recurrent family has of Triton kernels, behind one set of arguments.

Owns: ``DeviceMixer``: a layer's weights on the device, which kernel runs which rows, the references
where a mode has none. Does not know: projections, how rows came to the device.

Invariant: references take float32 activations and the host's forms; what they read and write of
pools and draft buffers keeps its type.
Read next: ``triton_batches.py``, ``gated_delta_net/triton.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyradix.kernels.device_forms import DeviceRoots, DeviceStates
from hyradix.kernels.gated_delta_net import tree_reference as gdn_trees
from hyradix.kernels.gated_delta_net import triton as gdn_step
from hyradix.kernels.gated_delta_net import triton_log as gdn_log
from hyradix.kernels.gated_delta_net import triton_prefill as gdn_prefill
from hyradix.kernels.gated_delta_net import triton_tree as gdn_tree
from hyradix.kernels.gated_delta_net.reference import MixerWeights
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, StepScratch
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch
from hyradix.kernels.kda import tree_reference as kda_trees
from hyradix.kernels.kda import triton as kda_step
from hyradix.kernels.kda import triton_prefill as kda_prefill
from hyradix.kernels.kda import triton_tree as kda_tree
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.kda.triton_chunks import KdaChunkScratch
from hyradix.kernels.kda.triton_tree import KdaTreeScratch
from hyradix.kernels.mamba2 import tree_reference as mamba2_trees
from hyradix.kernels.mamba2 import triton as mamba2_step
from hyradix.kernels.mamba2 import triton_prefill as mamba2_prefill
from hyradix.kernels.mamba2 import triton_tree as mamba2_tree
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.mamba2.triton_chunks import Mamba2ChunkScratch
from hyradix.kernels.mamba2.triton_tree import Mamba2TreeScratch
from hyradix.kernels.memory import moved
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch
from hyradix.kernels.triton_scratch import Maker, Scratch

Inputs = tuple[torch.Tensor, ...]
"""``projected``, and for KDA ``forget`` and ``gate``; the tokens of one kernel."""
Pools = tuple[torch.Tensor, torch.Tensor]
"""Windows and states of one layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels take the inputs, the weights, what the rows are, the pools, scratch, out.

    log_step None: ``step`` does it, told by keywords.
    """

    step: Callable[..., Any]
    log_step: Callable[..., Any] | None
    prefill: Callable[..., Any]
    trees: Callable[..., Any]
    trees_reference: Callable[..., None]


GDN = Family(
    gdn_step.step_, gdn_log.log_step_, gdn_prefill.mix_, gdn_tree.mix_trees_, gdn_trees.mix_trees
)
KDA = Family(kda_step.step_, None, kda_prefill.mix_, kda_tree.mix_trees_, kda_trees.mix_trees)
MAMBA2 = Family(
    mamba2_step.step_, None, mamba2_prefill.mix_, mamba2_tree.mix_trees_, mamba2_trees.mix_trees
)

Sized = tuple[Maker, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class DeviceMixer:
    """One layer. weights: as its kernels take them; reference: as the references do."""

    family: Family
    weights: Any
    reference: Any
    step_scratch: Sized
    chunk_scratch: Sized
    tree_scratch: Sized
    scratch: Scratch

    def step(self, inputs: Inputs, slots: torch.Tensor, pools: Pools, out: torch.Tensor) -> None:
        """One token of each row, in place."""
        scratch = self._get(self.step_scratch, out)
        self.family.step(*inputs, self.weights, slots, *pools, scratch, out)

    def log_step(
        self, inputs: Inputs, roots: DeviceRoots, pools: Pools, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        """One token of each row from base and log."""
        scratch = self._get(self.step_scratch, out)
        rows, counts = roots.rows, roots.num_log_rows
        if self.family.log_step is not None:
            self.family.log_step(
                *inputs, self.weights, roots.slots, rows, counts, *pools, spec, scratch, out
            )
        else:
            self.family.step(
                *inputs, self.weights, roots.slots, *pools, scratch, out,
                rows=rows, num_log_rows=counts, log=spec,
            )  # fmt: skip

    def prefill(self, inputs: Inputs, rows: DeviceStates, pools: Pools, out: torch.Tensor) -> None:
        """Rows of several tokens."""
        scratch = self._get(self.chunk_scratch, out)
        self.family.prefill(*inputs, self.weights, rows, *pools, scratch, out)

    def trees(
        self, inputs: Inputs, trees: DeviceTrees, pools: Pools, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        """All tokens are nodes, in mode ``log``."""
        maker, sizes = self.tree_scratch
        if maker is KdaTreeScratch:
            num_trees, num_nodes = trees.depths.shape
            padded = 1 << (num_trees - 1).bit_length()
            sizes = (padded, num_nodes, spec.num_log_rows, *sizes)
        scratch = self._get((maker, sizes), out)
        self.family.trees(*inputs, self.weights, trees, *pools, spec, scratch, out)

    def trees_by_reference(
        self, inputs: Inputs, trees: RaggedTrees, pools: Pools, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        """Trees in any mode."""
        wide = (x.float() for x in inputs)
        self.family.trees_reference(*wide, self.reference, trees, *pools, spec, out)

    def _get(self, sized: Sized, out: torch.Tensor) -> Any:
        maker, sizes = sized
        return self.scratch.get(maker, out.shape[0], *sizes)


def device_mixer(
    weights: MixerWeights | Mamba2Weights | KdaWeights, device: torch.device, scratch: Scratch
) -> DeviceMixer:
    """A layer's mixer on a device, its scratch declared."""
    if isinstance(weights, MixerWeights):
        made = _gated_delta_net(weights, device)
    elif isinstance(weights, Mamba2Weights):
        made = _mamba2(weights, device)
    else:
        made = _kda(weights, device)
    family, packed, step, chunk, tree = made
    scratch.declare(step[0], *step[1], by_row=True)
    scratch.declare(chunk[0], *chunk[1], by_row=False)
    return DeviceMixer(family, packed, moved(weights, device), step, chunk, tree, scratch)


Made = tuple[Family, Any, Sized, Sized, Sized]


def _gated_delta_net(weights: MixerWeights, device: torch.device) -> Made:
    k_heads, v_heads, v_dim = weights.num_k_heads, weights.dt_bias.numel(), weights.norm.numel()
    heads = (k_heads, v_heads, _k_dim(weights.conv, k_heads, v_heads, v_dim), v_dim)
    packed = PackedMixer.of(weights, device)
    return GDN, packed, (StepScratch, heads), (ChunkScratch, heads), (TreeScratch, heads)


def _mamba2(weights: Mamba2Weights, device: torch.device) -> Made:
    k_heads, v_heads = weights.num_k_heads, weights.dt_bias.numel()
    v_dim = weights.norm.numel() // v_heads
    heads = (k_heads, v_heads, _k_dim(weights.conv, k_heads, v_heads, v_dim), v_dim)
    step = mamba2_step.Mamba2Scratch, heads
    packed = mamba2_step.DeviceMamba2.of(weights, device)
    return MAMBA2, packed, step, (Mamba2ChunkScratch, heads), (Mamba2TreeScratch, heads)


def _kda(weights: KdaWeights, device: torch.device) -> Made:
    heads, v_dim = weights.num_heads, weights.norm.numel()
    sizes = (heads, weights.dt_bias.numel() // heads, v_dim)
    packed = kda_step.DeviceKda.of(weights, device)
    step = kda_step.KdaScratch, sizes
    return KDA, packed, step, (KdaChunkScratch, sizes), (KdaTreeScratch, sizes)


def _k_dim(conv: torch.Tensor, k_heads: int, v_heads: int, v_dim: int) -> int:
    return (conv.shape[0] - v_heads * v_dim) // (2 * k_heads)

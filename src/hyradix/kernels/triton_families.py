"""What each recurrent family has of Triton kernels, behind one set of arguments.

Owns: ``DeviceMixer``: a layer's weights on the device, which kernel runs which rows, the references
where a family or a mode has none. Does not know: projections, how rows came to the device.

Invariant: references take float32 activations and the host's forms; what they read and write of
pools and draft buffers keeps its type.
Read next: ``triton_batches.py``, ``gated_delta_net/triton.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyradix.errors import ConfigError
from hyradix.kernels.device_forms import DeviceRoots, DeviceStates
from hyradix.kernels.gated_delta_net import reference as gdn_reference
from hyradix.kernels.gated_delta_net import tree_reference as gdn_trees
from hyradix.kernels.gated_delta_net import triton as gdn_step
from hyradix.kernels.gated_delta_net import triton_log as gdn_log
from hyradix.kernels.gated_delta_net import triton_prefill as gdn_prefill
from hyradix.kernels.gated_delta_net import triton_tree as gdn_tree
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, StepScratch
from hyradix.kernels.gated_delta_rule.triton import ChunkScratch
from hyradix.kernels.kda import reference as kda_reference
from hyradix.kernels.kda import tree_reference as kda_trees
from hyradix.kernels.kda import triton as kda_step
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2 import reference as mamba2_reference
from hyradix.kernels.mamba2 import tree_reference as mamba2_trees
from hyradix.kernels.mamba2 import triton as mamba2_step
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.memory import moved
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees, TreeScratch
from hyradix.kernels.triton_scratch import Maker, Scratch

Inputs = tuple[torch.Tensor, ...]
"""``projected``, and for KDA ``forget`` and ``gate``; the tokens of one kernel."""
Pools = tuple[torch.Tensor, torch.Tensor]
"""Windows and states of one layer."""
Kernel = Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels take the inputs, the weights, what the rows are, the pools, scratch, out.

    log_step None: ``step`` does it, told by keywords. prefill, trees None: there is no kernel.
    """

    mix: Callable[..., torch.Tensor]
    mix_trees: Callable[..., None]
    step: Callable[..., Any]
    log_step: Kernel
    prefill: Kernel
    trees: Kernel


GDN = Family(
    gdn_reference.mix, gdn_trees.mix_trees, gdn_step.step_, gdn_log.log_step_, gdn_prefill.mix_,
    gdn_tree.mix_trees_,
)  # fmt: skip
KDA = Family(kda_reference.mix, kda_trees.mix_trees, kda_step.step_, None, None, None)
MAMBA2 = Family(
    mamba2_reference.mix, mamba2_trees.mix_trees, mamba2_step.step_, None, None, None
)  # fmt: skip

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
        if self.family.prefill is None:
            raise ConfigError("this family has no prefill on the device: decode on the host's rows")
        scratch = self._get(self.chunk_scratch, out)
        self.family.prefill(*inputs, self.weights, rows, *pools, scratch, out)

    def trees(
        self, inputs: Inputs, trees: DeviceTrees, pools: Pools, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        """All tokens are nodes, in mode ``log``."""
        assert self.family.trees is not None
        scratch = self._get(self.tree_scratch, out)
        self.family.trees(*inputs, self.weights, trees, *pools, spec, scratch, out)

    def mix_by_reference(self, inputs: Inputs, rows: RaggedStates, pools: Pools) -> torch.Tensor:
        """All plain rows of a step."""
        return self.family.mix(*_wide(inputs), self.reference, rows, *pools)

    def trees_by_reference(
        self, inputs: Inputs, trees: RaggedTrees, pools: Pools, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        """Trees in any mode."""
        self.family.mix_trees(*_wide(inputs), self.reference, trees, *pools, spec, out)

    def _get(self, sized: Sized, out: torch.Tensor) -> Any:
        maker, sizes = sized
        return self.scratch.get(maker, out.shape[0], *sizes)


def _wide(inputs: Inputs) -> Inputs:
    return tuple(x.float() for x in inputs)


def device_mixer(
    weights: MixerWeights | Mamba2Weights | KdaWeights, device: torch.device, scratch: Scratch
) -> DeviceMixer:
    """A layer's mixer on a device, its scratch declared."""
    reference = moved(weights, device)
    channels = weights.conv.shape[0]
    packed: Any
    step: Sized
    if isinstance(weights, MixerWeights):
        num_v_heads, v_dim = weights.dt_bias.numel(), weights.norm.numel()
        k_heads = weights.num_k_heads
        family, packed = GDN, PackedMixer.of(weights, device)
        step = StepScratch, (k_heads, num_v_heads, v_dim)
    elif isinstance(weights, Mamba2Weights):
        family, packed = MAMBA2, mamba2_step.DeviceMamba2.of(weights, device)
        num_v_heads, k_heads = weights.dt_bias.numel(), weights.num_k_heads
        v_dim = weights.norm.numel() // num_v_heads
        step = mamba2_step.Mamba2Scratch, (channels, num_v_heads, v_dim)
    else:
        family, packed = KDA, kda_step.DeviceKda.of(weights, device)
        num_v_heads = k_heads = weights.num_heads
        v_dim = weights.norm.numel()
        step = kda_step.KdaScratch, (num_v_heads, weights.dt_bias.numel() // num_v_heads, v_dim)
    k_dim = (channels - num_v_heads * v_dim) // (2 * k_heads)
    heads = (k_heads, num_v_heads, k_dim, v_dim)
    chunk, tree = (ChunkScratch, heads), (TreeScratch, heads)
    scratch.declare(step[0], *step[1], by_row=True)
    if family.prefill is not None:
        scratch.declare(chunk[0], *chunk[1], by_row=False)
    return DeviceMixer(family, packed, reference, step, chunk, tree, scratch)

"""KDA and Mamba2 layers of random weights, each with its kernels and its float64 twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.kda import reference as kda_reference
from hyradix.kernels.kda import tree_reference as kda_trees
from hyradix.kernels.kda import triton_prefill as kda_prefill
from hyradix.kernels.kda import triton_tree as kda_tree
from hyradix.kernels.kda.triton import DeviceKda
from hyradix.kernels.kda.triton_chunks import KdaChunkScratch
from hyradix.kernels.mamba2 import reference as mamba2_reference
from hyradix.kernels.mamba2 import tree_reference as mamba2_trees
from hyradix.kernels.mamba2 import triton_prefill as mamba2_prefill
from hyradix.kernels.mamba2 import triton_tree as mamba2_tree
from hyradix.kernels.mamba2.triton import DeviceMamba2
from hyradix.kernels.mamba2.triton_chunks import Mamba2ChunkScratch
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import KDA, MAMBA2, Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from tests.kernels.triton_kernels.cases import NAN, MixerShape

Tensors = list[torch.Tensor]


def wide(weights):
    """The same weights in float64."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(
        weights, **{n: x.double() for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    )


@dataclass(frozen=True)
class Family:
    """``sizes``: widths of what a token brings. The calls take those, then the two pools.

    mix, mix_trees: on the device, scratch full of NaN. twin, twin_trees: in float64 on the host.
    """

    rule: Rule
    shape: MixerShape
    sizes: tuple[int, ...]
    mix: Callable[[Tensors, RaggedStates, Tensors, torch.Tensor], object]
    twin: Callable[[Tensors, RaggedStates, Tensors], torch.Tensor]
    mix_trees: Callable[[Tensors, DeviceTrees, Tensors, SpecLayer, torch.Tensor], object]
    twin_trees: Callable[[Tensors, RaggedTrees, Tensors, SpecLayer, torch.Tensor], object]

    @property
    def dg(self) -> int:
        return self.shape.dk if self.rule.has_channel_decay else 1


def poisoned(scratch):
    """NaN in every array of it, so that only what a launch wrote can be read by the next."""
    for x in vars(scratch).values():
        if isinstance(x, torch.Tensor):
            x.fill_(NAN)
        else:
            poisoned(x)
    return scratch


def kda_family(
    shape: MixerShape, device: torch.device, *, lower_bound: float | None = None, rate: float = 4
) -> Family:
    """rate: of the strongest head's decay; log decays by channel go to some times that."""
    h, dk, dv = shape.hv, shape.dk, shape.dv
    raw = kda_reference.KdaWeights(
        num_heads=h, conv=torch.randn(shape.channels, shape.width) * 0.5,
        rate=torch.rand(h) * rate, dt_bias=torch.randn(h * dk) * 2, norm=torch.randn(dv),
        eps=1e-6, lower_bound=lower_bound,
    )  # fmt: skip
    weights = DeviceKda.of(raw, device)

    def mix(given, batch, pools, out):
        scratch = poisoned(KdaChunkScratch(given[0].shape[0], h, dk, dv, device))
        states = DeviceStates.of(batch, device)
        return kda_prefill.mix_(*given, weights, states, *pools, scratch, out)

    def mix_trees(given, trees, pools, spec, out):
        size = (given[0].shape[0], *trees.depths.shape, spec.num_log_rows)
        scratch = poisoned(kda_tree.KdaTreeScratch(*size, h, dk, dv, device))
        return kda_tree.mix_trees_(*given, weights, trees, *pools, spec, scratch, out)

    return Family(
        KDA, shape, (shape.channels + h, h * dk, h * dv), mix,
        lambda given, batch, pools: kda_reference.mix(*given, wide(raw), batch, *pools),
        mix_trees,
        lambda given, trees, pools, spec, out: kda_trees.mix_trees(
            *given, wide(raw), trees, *pools, spec, out
        ),
    )  # fmt: skip


def mamba2_family(
    shape: MixerShape, device: torch.device, *, dt_limits: tuple[float, float] = (0.0, float("inf"))
) -> Family:
    hk, hv, dk, dv = shape.hk, shape.hv, shape.dk, shape.dv
    raw = mamba2_reference.Mamba2Weights(
        num_k_heads=hk, conv=torch.randn(shape.channels, shape.width) * 0.5,
        conv_bias=torch.randn(shape.channels), decay_rate=-torch.rand(hv) * 4,
        dt_bias=torch.randn(hv), dt_limits=dt_limits, skip=torch.randn(hv),
        norm=torch.randn(hv * dv), num_norm_groups=hk, eps=1e-5,
    )  # fmt: skip
    weights = DeviceMamba2.of(raw, device)

    def mix(given, batch, pools, out):
        scratch = poisoned(Mamba2ChunkScratch(given[0].shape[0], hk, hv, dk, dv, device))
        states = DeviceStates.of(batch, device)
        return mamba2_prefill.mix_(*given, weights, states, *pools, scratch, out)

    def mix_trees(given, trees, pools, spec, out):
        scratch = mamba2_tree.Mamba2TreeScratch(given[0].shape[0], hk, hv, dk, dv, device)
        return mamba2_tree.mix_trees_(*given, weights, trees, *pools, spec, poisoned(scratch), out)

    return Family(
        MAMBA2, shape, (shape.channels + hv * dv + hv,), mix,
        lambda given, batch, pools: mamba2_reference.mix(*given, wide(raw), batch, *pools),
        mix_trees,
        lambda given, trees, pools, spec, out: mamba2_trees.mix_trees(
            *given, wide(raw), trees, *pools, spec, out
        ),
    )  # fmt: skip


def ragged(lengths: list[int], slots: list[int], saves: list[tuple[int, int, int]]) -> RaggedStates:
    """saves: (sequence, count, slot), sorted."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    for sequence, _, _ in saves:
        offsets[sequence + 1 :] += 1
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    at, there = ([x[i] for x in saves] for i in (1, 2))
    return RaggedStates(cu, *(np.array(x, np.int32) for x in (slots, offsets, at, there)))

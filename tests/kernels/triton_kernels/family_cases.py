"""KDA and Mamba2 layers of random weights, each with its kernels and its float64 twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.kda import reference as kda_reference
from hyradix.kernels.kda import tree_reference as kda_trees
from hyradix.kernels.kda import triton_prefill as kda_prefill
from hyradix.kernels.kda import triton_tree as kda_tree
from hyradix.kernels.kda.triton import DeviceKda
from hyradix.kernels.kda.triton_solve import KdaChunkScratch
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


def poisoned(scratch):
    """NaN in every array of it, so that only what a launch wrote can be read by the next."""
    for x in vars(scratch).values():
        if isinstance(x, torch.Tensor):
            x.fill_(NAN)
        else:
            poisoned(x)
    return scratch


@dataclass(frozen=True)
class Family:
    """One layer. ``sizes``: widths of what a token brings; calls take those, then the two pools.

    raw, weights: on the host, on the device. chunk_scratch: of so many tokens. tree_scratch: of
    tokens, trees, nodes, log rows. modules: reference, tree_reference, triton_prefill, triton_tree.
    """

    rule: Rule
    shape: MixerShape
    sizes: tuple[int, ...]
    raw: Any
    weights: Any
    chunk_scratch: Callable[[int], Any]
    tree_scratch: Callable[[int, int, int, int], Any]
    modules: tuple[Any, Any, Any, Any]

    @property
    def dg(self) -> int:
        return self.shape.dk if self.rule.has_channel_decay else 1

    def mix(self, given: Tensors, batch: DeviceStates, pools: Tensors, out: torch.Tensor) -> None:
        """On the device, scratch full of NaN."""
        scratch = poisoned(self.chunk_scratch(batch.sequences.shape[0]))
        self.modules[2].mix_(*given, self.weights, batch, *pools, scratch, out)

    def twin(self, given: Tensors, batch: RaggedStates, pools: Tensors) -> torch.Tensor:
        """In float64 on the host."""
        return self.modules[0].mix(*given, wide(self.raw), batch, *pools)

    def mix_trees(
        self, given: Tensors, trees: DeviceTrees, pools: Tensors, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        size = given[0].shape[0], *trees.depths.shape, spec.num_log_rows
        scratch = poisoned(self.tree_scratch(*size))
        self.modules[3].mix_trees_(*given, self.weights, trees, *pools, spec, scratch, out)

    def twin_trees(
        self, given: Tensors, trees: RaggedTrees, pools: Tensors, spec: SpecLayer, out: torch.Tensor
    ) -> None:
        self.modules[1].mix_trees(*given, wide(self.raw), trees, *pools, spec, out)


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
    return Family(
        KDA, shape, (shape.channels + h, h * dk, h * dv), raw, DeviceKda.of(raw, device),
        lambda tokens: KdaChunkScratch(tokens, h, dk, dv, device),
        lambda *size: kda_tree.KdaTreeScratch(*size, h, dk, dv, device),
        (kda_reference, kda_trees, kda_prefill, kda_tree),
    )  # fmt: skip


def mamba2_family(
    shape: MixerShape, device: torch.device, *, dt_limits: tuple[float, float] = (0.0, float("inf"))
) -> Family:
    sizes = hk, hv, _, dv = shape.hk, shape.hv, shape.dk, shape.dv
    raw = mamba2_reference.Mamba2Weights(
        num_k_heads=hk, conv=torch.randn(shape.channels, shape.width) * 0.5,
        conv_bias=torch.randn(shape.channels), decay_rate=-torch.rand(hv) * 4,
        dt_bias=torch.randn(hv), dt_limits=dt_limits, skip=torch.randn(hv),
        norm=torch.randn(hv * dv), num_norm_groups=hk, eps=1e-5,
    )  # fmt: skip
    return Family(
        MAMBA2, shape, (shape.channels + hv * dv + hv,), raw, DeviceMamba2.of(raw, device),
        lambda tokens: Mamba2ChunkScratch(tokens, *sizes, device),
        lambda tokens, *_: mamba2_tree.Mamba2TreeScratch(tokens, *sizes, device),
        (mamba2_reference, mamba2_trees, mamba2_prefill, mamba2_tree),
    )  # fmt: skip

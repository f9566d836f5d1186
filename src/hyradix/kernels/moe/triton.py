"""A mixture of experts on the GPU: each chosen expert's products with its own tokens, and the sum.

Owns: ``DeviceExperts`` (weights), ``ExpertScratch``, ``experts``. Does not know: routing, shared
experts, norms.

Four launches: the pairs (token, choice) by expert (``triton_routing.group_pairs``); up, with the
activation behind it; down; each token's weighted sum. Up to ``_ALONE`` tokens every pair is a block
of its own, in its own place, and nothing is sorted: what two of them read twice, they read from the
cache at about the same time.

Invariants:
- A token's result depends on its own row only, summed in one order (up to the block sizes, which
  follow from the number of tokens).
- What stands between the launches has the activations' type.
- Nothing waits for the device, shapes follow from the number of tokens: safe in a CUDA graph.
Read next: ``reference.py`` (the readable twin), ``triton_products.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.moe.reference import ExpertWeights, Routes
from hyradix.kernels.moe.triton_products import Groups, combine, product
from hyradix.kernels.moe.triton_routing import group_pairs
from hyradix.kernels.triton_table import ExpertConfig, expert_config

_ALONE = 4
"""Tokens up to which nothing is sorted."""


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """``ExpertWeights`` on the device, in the activations' type."""

    up: torch.Tensor
    down: torch.Tensor
    activation: Activation

    @classmethod
    def of(cls, weights: ExpertWeights, device: torch.device, dtype: torch.dtype) -> DeviceExperts:
        """Copies."""
        up, down = (x.to(device, dtype).contiguous() for x in (weights.up, weights.down))
        return cls(up, down, weights.activation)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.down.shape[0]

    @property
    def width(self) -> int:
        """H: numbers of a token."""
        return self.down.shape[1]

    @property
    def hidden(self) -> int:
        """I: numbers between up and down."""
        return self.down.shape[2]


class ExpertScratch:
    """For up to ``max_tokens`` tokens at a time, more go in turns; layers use it in turn.

    num_experts, hidden, width: the largest E, I and H among the layers.
    """

    def __init__(
        self,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        pairs = max_tokens * top_k
        self.max_tokens = max_tokens
        self.hidden = torch.empty(pairs * hidden, device=device, dtype=dtype)
        self.products = torch.empty(pairs * width, device=device, dtype=dtype)
        blocks = max_blocks(pairs, num_experts, 16)
        self.order, self.places, self.offsets, self.blocks = (
            torch.empty(size, device=device, dtype=torch.int32)
            for size in (pairs, pairs, num_experts + 1, 2 * blocks)
        )

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All memory."""
        indices = (self.order, self.places, self.offsets, self.blocks)
        return self.hidden, self.products, *indices

    @property
    def num_bytes(self) -> int:
        """Allocated."""
        return sum(x.nbytes for x in self.buffers)


def max_blocks(pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that so many pairs can need: every expert has some, the rest fills blocks."""
    return pairs if pairs <= num_experts else num_experts + (pairs - num_experts) // block_m


def experts(
    x: torch.Tensor,
    routes: Routes,
    weights: DeviceExperts,
    residual: torch.Tensor | None,
    scratch: ExpertScratch,
    *,
    out: torch.Tensor | None = None,
    config: ExpertConfig | None = None,
) -> torch.Tensor:
    """See ``reference.experts``: x ``[T, H]`` in the weights' type, residual and out ``[T, H]``.

    routes: ids ``int32[T, k]`` and weights, both dense.

    out: made where it is not given; it may be residual or x.
    """
    assert x.dtype == weights.up.dtype
    assert x.stride(1) == 1
    if out is None:
        out = x.new_empty(x.shape[0], weights.width)
    for first in range(0, x.shape[0], scratch.max_tokens):
        part = slice(first, first + scratch.max_tokens)
        mine = Routes(routes.ids[part], routes.weights[part], None)
        added = None if residual is None else residual[part]
        _experts(x[part], mine, weights, added, scratch, out[part], config)
    return out


def _experts(
    x: torch.Tensor,
    routes: Routes,
    weights: DeviceExperts,
    residual: torch.Tensor | None,
    scratch: ExpertScratch,
    out: torch.Tensor,
    config: ExpertConfig | None,
) -> None:
    """``experts`` of tokens that fit the scratch."""
    (count, top_k), num_experts = routes.ids.shape, weights.num_experts
    pairs, hidden, width = count * top_k, weights.hidden, weights.width
    config = config or expert_config(
        x.device, pairs=pairs, num_experts=num_experts, itemsize=x.element_size()
    )
    groups = _groups(routes.ids, num_experts, config.block_m, scratch)
    between = scratch.hidden[: pairs * hidden].view(pairs, hidden)
    products = scratch.products[: pairs * width].view(pairs, width)
    block_m = config.block_m
    product(x, weights.up, groups, between, block_m, config.up, top_k, weights.activation)
    product(between, weights.down, groups, products, block_m, config.down, 0, "none")
    combine(products, groups, routes.weights, residual, out)


def _groups(ids: torch.Tensor, num_experts: int, block_m: int, scratch: ExpertScratch) -> Groups:
    pairs = ids.numel()
    order, places = scratch.order[:pairs], scratch.places[:pairs]
    offsets = scratch.offsets[: num_experts + 1]
    if ids.shape[0] <= _ALONE:
        return Groups(order, places, offsets, ids.view(-1), is_alone=True)
    num_blocks = max_blocks(pairs, num_experts, block_m)
    blocks = scratch.blocks[: 2 * num_blocks].view(num_blocks, 2)
    group_pairs(ids, block_m, order, places, offsets, blocks)
    return Groups(order, places, offsets, blocks, is_alone=False)

"""Products of a mixture of experts on the GPU: each chosen expert with its own tokens, and the sum.

Owns: ``DeviceExperts`` (weights), ``ExpertScratch``, ``experts``. Does not know: routing, shared
experts, norms.

Four launches: the pairs (token, choice) by expert (``triton_routing.group_pairs``); up, with the
activation behind it; down; each token's weighted sum. A program of a product takes one block of one
expert's pairs and some outputs, so that with few tokens every chosen expert's weights are read
once. There are as many programs as the worst case of a batch needs; those without a block return.
Up to ``_ALONE`` tokens every pair is a block of its own, in its own place, and nothing is sorted:
what two of them read twice, they read from the cache at about the same time.

Invariants:
- A token's result depends on its own row only, summed in one order (up to the block sizes, which
  follow from the number of tokens).
- Sums are float32; what stands between the launches has the activations' type.
- Nothing waits for the device, shapes follow from the number of tokens: safe in a CUDA graph.
Read next: ``reference.py`` (the readable twin), ``../triton_table.py`` (block sizes).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.moe.reference import ExpertWeights, Routes
from hyradix.kernels.moe.triton_routing import group_pairs
from hyradix.kernels.triton_support import launch, load32, power_of_two, silu, store
from hyradix.kernels.triton_table import ExpertConfig, ProductConfig, expert_config

_ALONE = 4
_COLUMNS = 1024
"""Outputs of one token that a program sums."""


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


@dataclass(frozen=True, slots=True)
class Groups:
    """What ``group_pairs`` fills; is_alone: it did not, and blocks are the pairs' experts."""

    order: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor
    is_alone: bool


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
    _product(x, weights.up, groups, between, block_m, config.up, top_k, weights.activation)
    _product(between, weights.down, groups, products, block_m, config.down, 0, "none")
    launch(
        _combine_kernel,
        (count, triton.cdiv(width, _COLUMNS)),
        products, groups.places, routes.weights, out if residual is None else residual,
        0 if residual is None else residual.stride(0), out, out.stride(0),
        width, top_k, residual is not None, groups.is_alone, _COLUMNS,
    )  # fmt: skip


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


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
    block_m: int,
    config: ProductConfig,
    top_k: int,
    activation: str,
) -> None:
    """out's rows are places; x's are tokens where ``top_k`` says how many places each has."""
    outputs, size = out.shape[1], weight.shape[2]
    block_n = min(config.block_n, power_of_two(outputs, least=16))
    block_k = min(config.block_k, power_of_two(size, least=16))
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    launch(
        _product_kernel,
        (groups.blocks.shape[0] * triton.cdiv(outputs, block_n),),
        x, x.stride(0), weight, groups.order, groups.offsets, groups.blocks, out, weight.shape[1],
        size, outputs, top_k, groups.is_alone, activation == "swiglu", activation == "relu2",
        block_m, block_n, block_k, size % block_k == 0, precision, config.stages,
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip


@triton.jit
def _product_kernel(
    x, x_stride, weight, order, offsets, blocks, out,
    ROWS: tl.constexpr, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr,
    IS_ALONE: tl.constexpr, IS_SWIGLU: tl.constexpr, IS_RELU2: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs past the end are computed as output 0 and not stored."""
    TILES: tl.constexpr = (OUTPUTS + BN - 1) // BN
    block = tl.program_id(0) // TILES
    if IS_ALONE:
        expert = tl.load(blocks + block).to(tl.int64)
        place = block + tl.arange(0, BM)
        is_row = place == block
        row = place // TOP_K if TOP_K > 0 else place
    else:
        expert = tl.load(blocks + 2 * block).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(blocks + 2 * block + 1) + tl.arange(0, BM)
        is_row = place < tl.load(offsets + expert + 1)
        row = place
        if TOP_K > 0:
            row = tl.load(order + place, mask=is_row, other=0) // TOP_K
    n, i = tl.program_id(0) % TILES * BN + tl.arange(0, BN), tl.arange(0, BK)
    source = x + row.to(tl.int64)[:, None] * x_stride
    real = tl.where(n < OUTPUTS, n, 0)
    weight += expert * (ROWS * SIZE) + real[None, :] * SIZE
    total = tl.zeros([BM, BN], tl.float32)
    ups = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, SIZE, BK, num_stages=STAGES):
        k = first + i
        if IS_EVEN:
            inputs = tl.load(source + k[None, :], mask=is_row[:, None], other=0.0)
            weights = tl.load(weight + k[:, None])
        else:
            inside = is_row[:, None] & (k < SIZE)[None, :]
            inputs = tl.load(source + k[None, :], mask=inside, other=0.0)
            weights = tl.load(weight + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
        total = tl.dot(inputs, weights, total, input_precision=PRECISION)
        if IS_SWIGLU:
            if IS_EVEN:
                weights = tl.load(weight + OUTPUTS * SIZE + k[:, None])
            else:
                place_up = weight + OUTPUTS * SIZE + k[:, None]
                weights = tl.load(place_up, mask=(k < SIZE)[:, None], other=0.0)
            ups = tl.dot(inputs, weights, ups, input_precision=PRECISION)
    if IS_SWIGLU:
        total = silu(total) * ups
    if IS_RELU2:
        total = tl.where(total < 0.0, 0.0, total)
        total *= total
    target = out + place.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    store(target, total, is_row[:, None] & (n < OUTPUTS)[None, :])


@triton.jit
def _combine_kernel(
    products, places, weights, residual, residual_stride, out, out_stride,
    WIDTH: tl.constexpr, K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + sum over choices, in their order."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = token * K + j
        if not IS_ALONE:
            place = tl.load(places + place).to(tl.int64)
        weight = tl.load(weights + token * K + j)
        total += weight * load32(products + place * WIDTH + c, inside)
    if HAS_RESIDUAL:
        total += load32(residual + token * residual_stride + c, inside)
    store(out + token * out_stride + c, total, inside)

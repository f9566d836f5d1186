"""Router logits to experts and weights, one launch; and the pairs (token, choice) by expert, one.

Owns: ``DeviceRouting``, ``route``, ``group_pairs``. Does not know: products, layers.

Invariants:
- Of equal scores the expert with the lower number is chosen, as in ``compiled.route``.
- Chosen experts are valid and all different, whatever the logits are (NaN included).
- The order of the pairs is by expert, then by pair: no atomics, the same every time.
- Nothing waits for the device, shapes follow from the number of tokens: safe in a CUDA graph.
Read next: ``reference.py`` (the readable twin), ``triton.py`` (the products).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.moe.reference import TINY, Routes, Routing
from hyradix.kernels.triton_support import launch, load32, power_of_two, sigmoid

_LOWEST = tl.constexpr(-1e38)
"""What NaN counts as; twice that is still finite."""
_PAIRS = 1024
"""Pairs that a program compares with its expert at a time."""


@dataclass(frozen=True, slots=True)
class DeviceRouting:
    """``Routing``, its bias ``float32[E]`` on the device."""

    routing: Routing
    bias: torch.Tensor | None

    @classmethod
    def of(cls, routing: Routing, device: torch.device) -> DeviceRouting:
        """Copies."""
        size = routing.num_experts // routing.num_groups
        assert size * routing.num_groups == routing.num_experts
        assert routing.top_k <= size * min(routing.top_groups, routing.num_groups)
        assert size > 1 or routing.top_groups == routing.num_groups
        bias = routing.bias
        on_device = None if bias is None else bias.to(device, torch.float32).contiguous()
        return cls(routing, on_device)


def route(logits: torch.Tensor, routing: DeviceRouting) -> Routes:
    """See ``reference.route``: ids ``int32[T, k]``; weights and shared float32."""
    rules, count = routing.routing, logits.shape[0]
    assert logits.stride(1) == 1
    ids = logits.new_empty(count, rules.top_k, dtype=torch.int32)
    weights = logits.new_empty(count, rules.top_k, dtype=torch.float32)
    shared = logits.new_empty(count, 1, dtype=torch.float32) if rules.has_shared_gate else None
    groups = rules.num_groups if rules.top_groups < rules.num_groups else 1
    size = rules.num_experts // groups
    block = power_of_two(groups) * power_of_two(size)
    launch(
        _route_kernel,
        (count,),
        logits, logits.stride(0), logits if routing.bias is None else routing.bias, ids, weights,
        weights if shared is None else shared, rules.scale, TINY, size, groups, rules.top_groups,
        rules.top_k, rules.scoring == "softmax", routing.bias is not None, rules.is_normalised,
        shared is not None, power_of_two(groups), power_of_two(size), power_of_two(rules.top_k),
        num_warps=1 if block <= 512 else 4,
    )  # fmt: skip
    return Routes(ids, weights, shared)


@triton.jit
def _route_kernel(
    logits, stride, bias, ids, weights, shared, scale, tiny,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NORMALISED: tl.constexpr,
    HAS_SHARED: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Number i of a program's block is expert (i // BS) SIZE + i % BS.

    What cannot be chosen (any more) is -inf; NaN is below everything else.
    """
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    i = tl.arange(0, BG * BS)
    group, member = i // BS, i % BS
    expert = group * SIZE + member
    inside = (group < GROUPS) & (member < SIZE)
    score = tl.load(logits + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        top = tl.max(tl.where(score > _LOWEST, score, _LOWEST), 0)
        score = tl.exp(score - top)
        score = score / tl.sum(score, 0)
    else:
        score = sigmoid(score)
    choice = score
    if HAS_BIAS:
        choice += load32(bias + expert, inside)
    choice = tl.where(choice > _LOWEST, choice, _LOWEST)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        worth = _worth(tl.reshape(choice, [BG, BS]), BG, BS)
        g = tl.arange(0, BG)
        worth = tl.where(g < GROUPS, worth, float("-inf"))
        is_kept = tl.zeros([BG * BS], tl.int1)
        for _ in range(TOP_GROUPS):
            best = tl.argmax(worth, 0, tie_break_left=True)
            is_kept = is_kept | (group == best)
            worth = tl.where(g == best, float("-inf"), worth)
        choice = tl.where(is_kept, choice, float("-inf"))
    j = tl.arange(0, BK)
    chosen = tl.zeros([BK], tl.int32)
    weight = tl.zeros([BK], tl.float32)
    for n in range(K):
        best = tl.argmax(choice, 0, tie_break_left=True)
        is_best = i == best
        chosen = tl.where(j == n, best // BS * SIZE + best % BS, chosen)
        weight = tl.where(j == n, tl.sum(tl.where(is_best, score, 0.0), 0), weight)
        choice = tl.where(is_best, float("-inf"), choice)
    if IS_NORMALISED:
        weight = weight / (tl.sum(weight, 0) + tiny)
    tl.store(ids + token * K + j, chosen, mask=j < K)
    tl.store(weights + token * K + j, weight * scale, mask=j < K)
    if HAS_SHARED:
        gate = tl.load(logits + GROUPS * SIZE).to(tl.float32)
        tl.store(shared + token, sigmoid(gate))


@triton.jit
def _worth(choice, BG: tl.constexpr, BS: tl.constexpr):
    """The sum of the two best of each row of ``[BG, BS]``; finite where the row has two."""
    s = tl.arange(0, BS)
    best = tl.max(choice, 1)
    first = tl.argmax(choice, 1, tie_break_left=True)
    others = tl.where(s[None, :] == first[:, None], float("-inf"), choice)
    return best + tl.max(others, 1)


def group_pairs(
    ids: torch.Tensor,
    block_m: int,
    order: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    blocks: torch.Tensor,
) -> None:
    """Sort the pairs of ids ``[T, k]`` by expert, and cut each expert's into blocks.

    Effects: order ``int32[T k]``: the pair at each place. places ``int32[T k]``: where each pair
    went. offsets ``int32[E+1]``: expert e has the places offsets[e] : offsets[e+1]. blocks
    ``int32[B, 2]``: (expert, first place) of up to ``block_m`` places, (-1, 0) where none is left.
    """
    assert ids.is_contiguous()
    num_experts = offsets.shape[0] - 1
    launch(
        _group_kernel,
        (num_experts,),
        ids, ids.numel(), order, places, offsets, blocks, blocks.shape[0], num_experts,
        power_of_two(num_experts, least=32), block_m, min(power_of_two(ids.numel(), least=128),
        _PAIRS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group_kernel(
    ids, num_pairs, order, places, offsets, blocks, num_blocks,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e counts all pairs by expert, so that it knows where its own begin; places those."""
    expert = tl.program_id(0)
    e, i = tl.arange(0, BE), tl.arange(0, BLOCK)
    counts = tl.zeros([BE], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        is_pair = first + i < num_pairs
        own = tl.load(ids + first + i, mask=is_pair, other=0)
        counts += tl.histogram(own, BE, mask=is_pair)
    before = tl.sum(tl.where(e < expert, counts, 0), 0)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first_block = tl.sum(tl.where(e < expert, (counts + BM - 1) // BM, 0), 0)
    last_block = first_block + (count + BM - 1) // BM
    tl.store(offsets + expert, before)
    for b in range(first_block, last_block, BLOCK):
        inside = b + i < last_block
        tl.store(blocks + 2 * (b + i), expert + tl.zeros([BLOCK], tl.int32), mask=inside)
        tl.store(blocks + 2 * (b + i) + 1, before + (b + i - first_block) * BM, mask=inside)
    if expert == E - 1:
        tl.store(offsets + E, before + count)
        for b in range(last_block, num_blocks, BLOCK):
            inside = b + i < num_blocks
            tl.store(blocks + 2 * (b + i), tl.full([BLOCK], -1, tl.int32), mask=inside)
            tl.store(blocks + 2 * (b + i) + 1, tl.zeros([BLOCK], tl.int32), mask=inside)
    if count == 0:
        return
    for first in range(0, num_pairs, BLOCK):
        is_pair = first + i < num_pairs
        is_own = is_pair & (tl.load(ids + first + i, mask=is_pair, other=-1) == expert)
        place = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, first + i, mask=is_own)
        tl.store(places + first + i, place, mask=is_own)
        before += tl.sum(is_own.to(tl.int32), 0)

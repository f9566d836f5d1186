"""A step's rows as the host describes them, made into the forms that kernels on a device take.

Owns: which rows run token by token and which by chunks, what was converted already. Does not know:
layers, weights.

Invariants:
- A form is made once a step: the last of each kind is remembered by the identity of its source.
- All is copied: the host may change its own while the device works. A copy in the middle of a layer
  stands between two launches, which therefore never overlap (``triton_support.py``).
Read next: ``device_forms.py``, ``triton_tokens.py``, ``triton_ops.py`` (the caller).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.device_forms import (
    DeviceRoots,
    DeviceRows,
    DeviceStates,
    DeviceTokens,
    DeviceWanted,
)
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.memory import upload
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from hyradix.kernels.triton_tokens import host_tokens

Tokens = slice | torch.Tensor
"""Tokens of the step: a run of them, or ``int64`` numbers on the device."""
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows by the kernel that runs them; either part may be missing.

    singles: ``int32[N]`` slots of the rows of one token. saves: ``int64`` slots that are copied,
    once those have run, and where to.
    """

    prefill: DeviceStates | None
    prefill_tokens: Tokens
    singles: torch.Tensor | None
    single_tokens: Tokens
    saves: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """Draft trees, their tokens counted from ``first``."""

    first: int
    trees: DeviceTrees


class Batches:
    """Conversions to ``device``, each remembered until another step's comes.

    itemsize: bytes of a number of the KV pools.
    """

    def __init__(self, device: torch.device, itemsize: int) -> None:
        self._device = device
        self._itemsize = itemsize
        self._last: dict[Any, tuple[Any, Any]] = {}

    def _once(self, kind: Any, source: Any, make: Callable[[], Any]) -> Any:
        known = self._last.get(kind)
        if known is None or known[0] is not source:
            known = self._last[kind] = (source, make())
        return known[1]

    def rows(self, batch: RaggedStates | DeviceRows) -> PlainRows:
        """What changes working states."""
        if isinstance(batch, DeviceRows):
            return _device_rows(batch)
        rows: PlainRows = self._once("rows", batch, lambda: _host_rows(batch, self._device))
        return rows

    def trees(self, trees: RaggedTrees | DeviceRoots | DeviceTrees) -> DeviceRoots | TreeTokens:
        """Trees of mode ``log``: as roots where no tree has another node."""
        if isinstance(trees, DeviceRoots):
            return trees
        if isinstance(trees, DeviceTrees):
            return TreeTokens(0, trees)
        found: DeviceRoots | TreeTokens = self._once(
            "trees", trees, lambda: _host_trees(trees, self._device)
        )
        return found

    def tokens(
        self,
        batch: RaggedQueries | DeviceTokens,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        is_latent: bool = False,
    ) -> DeviceTokens:
        """What the tokens see, for layers of such a shape."""
        if isinstance(batch, DeviceTokens):
            return batch
        forms: DeviceTokens = self._once(
            (heads, kv_heads, dim),
            batch,
            lambda: host_tokens(
                batch,
                heads // kv_heads,
                kv_heads,
                dim,
                self._itemsize,
                self._device,
                is_latent=is_latent,
            ),
        )
        return forms

    def wanted(
        self,
        wanted: WantedTokens | DeviceWanted,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        is_latent: bool = False,
    ) -> DeviceWanted:
        """Those of a step that attend in the last layer."""
        if isinstance(wanted, DeviceWanted):
            return wanted
        forms = self.tokens(wanted.queries, heads, kv_heads, dim, is_latent=is_latent)
        return DeviceWanted(upload(wanted.index, self._device), forms.parts)


def _device_rows(batch: DeviceRows) -> PlainRows:
    prefill, singles = batch.prefill, batch.singles
    num_prefill = 0 if prefill is None else prefill.sequences.shape[0]
    if singles is None:
        return PlainRows(prefill, slice(0, num_prefill), None, slice(0, 0))
    first = singles.first_token
    there = slice(first, first + singles.slots.shape[0])
    return PlainRows(prefill, slice(0, num_prefill), singles.slots, there)


def _host_rows(batch: RaggedStates, device: torch.device) -> PlainRows:
    counts = np.diff(batch.cu_seqlens)
    is_long, is_single = counts > 1, counts == 1
    prefill, singles, saves = None, None, None
    if is_long.any():
        prefill = DeviceStates.of(_subset(batch, counts, is_long), device)
    if is_single.any():
        singles = upload(batch.slots[is_single], device)
        mine = _subset(batch, counts, is_single)
        if len(mine.save_slots):
            sources = np.repeat(mine.slots, np.diff(mine.save_offsets)).astype(np.int64)
            saves = upload(sources, device), upload(mine.save_slots.astype(np.int64), device)
    token_rows = np.repeat(np.arange(len(counts)), counts)
    return PlainRows(
        prefill,
        _tokens(np.flatnonzero(is_long[token_rows]), device),
        singles,
        _tokens(np.flatnonzero(is_single[token_rows]), device),
        saves,
    )


def _subset(batch: RaggedStates, counts: Int32Array, chosen: npt.NDArray[np.bool_]) -> RaggedStates:
    """The chosen rows with their saves, as if there were no others."""
    num_saves = np.diff(batch.save_offsets)
    mine = np.repeat(chosen, num_saves)
    return RaggedStates(
        _offsets(counts[chosen]),
        batch.slots[chosen],
        _offsets(num_saves[chosen]),
        batch.save_at[mine],
        batch.save_slots[mine],
    )


def _offsets(counts: npt.NDArray[Any]) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _tokens(numbers: npt.NDArray[np.int64], device: torch.device) -> Tokens:
    """A run where the ascending numbers are one."""
    count = len(numbers)
    if count == 0:
        return slice(0, 0)
    if numbers[-1] - numbers[0] == count - 1:
        return slice(int(numbers[0]), int(numbers[0]) + count)
    return upload(numbers, device)


def _host_trees(trees: RaggedTrees, device: torch.device) -> DeviceRoots | TreeTokens:
    first, sizes = int(trees.first_token[0]), np.diff(trees.trees.cu_nodes)
    largest = int(sizes.max())
    if largest == 1:
        assert np.array_equal(trees.first_token - first, np.arange(len(sizes)))
        numbers = (trees.slots, trees.rows, trees.num_log_rows)
        return DeviceRoots(first, *(upload(x, device) for x in numbers))
    relative = RaggedTrees(
        trees.trees, trees.first_token - np.int32(first), trees.slots, trees.rows,
        trees.num_log_rows, trees.taps,
    )  # fmt: skip
    padded = 1 << (largest - 1).bit_length()  # few sizes: each is compiled
    return TreeTokens(first, DeviceTrees.of(relative, padded, device))

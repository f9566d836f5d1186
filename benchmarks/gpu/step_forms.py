"""Steps of every form that ``TritonOps`` takes, on pools of any model: to compile, not for sense.

Owns: ``FormMaker``. Does not know: who runs the steps. Numbers stand in range, memory is not
filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hyradix.device_bytes import GATHERED_KEYS
from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.attention.triton import (
    DeviceQueries,
    num_programs,
    query_blocks,
    tokens_per_block,
)
from hyradix.kernels.attention.triton_gather import DeviceKeys, gathers, key_layout
from hyradix.kernels.device_forms import (
    DeviceRoots,
    DeviceRows,
    DeviceSingles,
    DeviceStates,
    DeviceTokens,
    Part,
)
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.state_slots.triton import Registry, move_rows_
from hyradix.kernels.tree_recurrence.keeping import Moves
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.kernels.tree_recurrence.rules import RULES
from hyradix.kernels.triton_ops import TritonOps
from hyradix.kernels.triton_table import attend_config
from hyradix.layers.context import ForwardContext, LayerMemory
from hyradix.models.config import ModelConfig
from hyradix.spec_decode.draft_buffers import DraftBuffers, StatePoolTensors
from hyradix.state_bytes import SpecShape

LOG_ROWS = 16
ROWS = 264
WIDTH = 2_048
DECODES = (1, 2, 3, 8, 16, 17, 24, 64, 80, 256)
PREFILLS = (2, 16, 17, 64, 65, 300, 5_000)
NODES = (2, 4, 8, 16, 32, 64)


def _offsets(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


class FormMaker:
    """Small pools, and contexts over them."""

    def __init__(self, config: ModelConfig, ops: TritonOps) -> None:
        self._config, self._ops = config, ops
        heads, slots = (config.num_kv_heads, config.head_dim), 64
        kv = config.num_attention_layers

        def empty(*shape: int, dtype: torch.dtype = ops.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=ops.device)

        lead = (config.num_recurrent_layers, ROWS + 1)
        state = (config.num_v_heads, config.k_dim, config.v_dim)
        self._conv = empty(*lead, config.conv_width - 1, config.conv_channels)
        self._recurrent = torch.empty(*lead, *state, device=ops.device)
        has_v = not config.has_latent_kv
        self._memory = LayerMemory(
            k=tuple(empty(kv, slots, *heads)),
            v=tuple(empty(kv, slots, *heads)) if has_v else (),
            conv=tuple(self._conv),
            recurrent=tuple(self._recurrent),
        )
        self._table = np.zeros((ROWS, WIDTH), np.int32)
        self._kv_table = torch.from_numpy(self._table)

    def buffers(self, num_nodes: int) -> DraftBuffers:
        """Of mode ``log``."""
        shape = self._config.recurrent_shape(self._ops.dtype.itemsize)
        spec = SpecShape(num_requests=ROWS - 1, num_nodes=num_nodes, num_log_rows=LOG_ROWS)
        pool = StatePoolTensors(self._recurrent, self._conv, None)
        return DraftBuffers("log", self._ops, shape, spec, pool)

    def contexts(self) -> Iterator[tuple[Any, ForwardContext]]:
        """Token ids and contexts of many steps."""
        roots = self.buffers(1)
        for size in DECODES:
            yield self._device_step([], size, None)
            yield self._device_step([], size, roots)
        for count in PREFILLS:
            yield self._device_step([count], 0, None)
            yield self._device_step([count, 70], 3, None)
            yield self._device_step([count], 0, None, GATHERED_KEYS)
            yield self._device_step([count], 1, roots)
            yield self._host_step([count, 1, 9, 1])
        for nodes in NODES:
            for num_trees in (1, 3, 32):
                yield self._host_trees(nodes, num_trees, [])
        yield self._host_trees(4, 2, [40])

    def _numbers(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self._ops.device)

    def _ids(self, count: int) -> torch.Tensor:
        return self._numbers(np.zeros(count))

    def _device_step(
        self, prefill: list[int], decodes: int, log: DraftBuffers | None, start: int = 5
    ) -> tuple[Any, ForwardContext]:
        states, singles, roots = None, None, None
        first, parts = sum(prefill), []
        total = first + decodes
        if prefill:
            states = DeviceStates.of(_states(prefill), self._ops.device)
            parts.append(self._part(prefill, 0, 0, start))
        if decodes:
            parts.append(self._part([1] * decodes, len(prefill), first))
        tokens = DeviceTokens(self._ids(total), self._ids(total), tuple(parts))
        slots = self._numbers(np.arange(decodes) + 1)
        if decodes and log is None:
            singles = DeviceSingles(first, slots)
        elif decodes:
            roots = DeviceRoots(first, slots, slots, self._numbers(np.zeros(decodes)))
        layers = () if log is None else log.layers
        forms: Any = DeviceRows(states, singles), tokens, self._memory, roots, layers
        return self._ids(total), ForwardContext(*forms)

    def _part(self, counts: list[int], first_row: int, first: int, start: int = 5) -> Part:
        """Rows that attend together, as the runner has them; their tokens stand from ``first``."""
        longest, config, cu = max(counts), self._config, _offsets(counts)
        group = config.num_heads // config.num_kv_heads
        num_keys = np.array(counts, np.int32) + np.int32(start)
        is_gathered = config.latent is None and gathers(
            np.array(counts), num_keys, group, dim=config.head_dim,
            itemsize=self._ops.dtype.itemsize,
        )  # fmt: skip
        attend = attend_config(
            self._ops.device, rows=longest * group,
            programs=num_programs(np.array(counts), group, config.num_kv_heads),
            dim=config.head_dim, itemsize=self._ops.dtype.itemsize, is_gathered=is_gathered,
        )  # fmt: skip
        starts = np.full(len(counts), start, np.int32)
        blocks = query_blocks(cu, starts, tokens_per_block(attend, group))
        keys = None
        if is_gathered:
            keys = DeviceKeys(*(self._numbers(x) for x in key_layout(num_keys)))
        queries = DeviceQueries(
            self._numbers(cu), self._numbers(np.arange(len(counts)) + first_row),
            self._numbers(starts), self._numbers(blocks), self._kv_table,
        )  # fmt: skip
        return Part(slice(first, first + sum(counts)), queries, attend, keys)

    def _host_step(self, counts: list[int]) -> tuple[Any, ForwardContext]:
        """As the synchronous runner runs rows that prefill and decode."""
        return self._ids(sum(counts)), ForwardContext(
            _states(counts), self._queries(counts, None), self._memory
        )

    def _queries(self, counts: list[int], trees: FlatTrees | None) -> RaggedQueries:
        total = sum(counts)
        zeros = np.zeros(total, np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        starts = np.full(len(counts), 5, np.int32)
        return RaggedQueries.of(
            _offsets(counts), rows, starts, zeros, zeros, self._table, trees=trees
        )

    def _host_trees(
        self, nodes: int, num_trees: int, prefill: list[int]
    ) -> tuple[Any, ForwardContext]:
        parents = np.tile(np.arange(-1, nodes - 1, dtype=np.int32), num_trees)
        flat = FlatTrees.of(_offsets([nodes] * num_trees), parents)
        buffers, slots = self.buffers(nodes), np.arange(1, num_trees + 1, dtype=np.int32)
        first = _offsets([nodes] * num_trees)[:-1] + np.int32(sum(prefill))
        trees = buffers.arrange(flat, first, slots - np.int32(1), slots, np.zeros_like(slots))
        counts = prefill + [nodes] * num_trees
        queries = self._queries(counts, flat)
        context = ForwardContext(_states(prefill), queries, self._memory, trees, buffers.layers)
        return self._ids(sum(counts)), context

    def movements(self) -> None:
        """Folds, slots and rows that move."""
        ops, rules = self._ops, {rule.name: rule for rule in RULES}
        rule, pools = rules[self._config.recurrence], (self._recurrent, self._conv)
        move = ops.slot_mover(pools)
        for nodes in (1, 4):
            buffers = self.buffers(nodes)
            arrays = buffers.arrays
            moved = Registry(
                [arrays.k, arrays.u, arrays.g, arrays.conv], [0, 0, 0, buffers.first_row]
            )
            for count in (1, 2, 16, 17):
                numbers = np.arange(1, count + 1, dtype=np.int32)
                taps = np.zeros((count, self._config.conv_width - 1), np.int32)
                ops.fold(rule, arrays, Moves(numbers, numbers, numbers, numbers, taps))
                move(numbers, numbers)
                there = self._numbers(numbers)
                for left in (1, 15, 16):
                    move_rows_(moved, there, self._numbers(np.ones((count, left))), there, there)


def _states(counts: list[int]) -> RaggedStates:
    number = len(counts)
    slots = np.arange(1, number + 1, dtype=np.int32)
    saves = np.array([number + 1] if counts else [], np.int32)
    offsets = np.minimum(np.arange(number + 1, dtype=np.int32), 1)
    at = np.array([counts[0]] if counts else [], np.int32)
    return RaggedStates(_offsets(counts), slots, offsets, at, saves)

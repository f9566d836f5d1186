"""What a step's tokens see, made of the host's description for attention on a device.

Owns: the compact copy of the KV table, ancestors as bits, the choice of a configuration.
Does not know: layers, weights, pools.

Invariants:
- The table's rows are the batch's, in its order, as wide as the longest needs.
- Trees of several nodes attend by themselves: their mask is another.
Read next: ``attention/queries.py``, ``attention/triton.py``, ``triton_batches.py`` (the caller).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.queries import Int32Array, RaggedQueries
from hyradix.kernels.attention.triton import (
    DeviceQueries,
    num_programs,
    query_blocks,
    tokens_per_block,
)
from hyradix.kernels.attention.triton_gather import DeviceKeys, gathers, key_layout
from hyradix.kernels.device_forms import DeviceTokens, Part
from hyradix.kernels.memory import upload
from hyradix.kernels.triton_table import attend_config


def host_tokens(
    batch: RaggedQueries, group: int, kv_heads: int, dim: int, itemsize: int, device: torch.device,
    *, is_latent: bool,
) -> DeviceTokens:  # fmt: skip
    """For layers with ``group`` query heads to each of ``kv_heads`` heads of ``dim`` numbers."""
    counts, starts, table = np.diff(batch.cu_seqlens), batch.starts, _compact_table(batch)
    num_rows, num_trees = len(batch.rows), batch.num_trees
    num_plain = num_rows - num_trees
    if num_trees and int(counts[num_plain:].max()) == 1:
        starts, table = _unroll_tails(batch, starts, table)
        num_plain, num_trees = num_rows, 0
    on_device = upload(table, device)
    parts = []
    for first, last in ((0, num_plain), (num_plain, num_rows)):
        if first == last:
            continue
        begin, end = int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last])
        mine, longest = counts[first:last], int(counts[first:last].max())
        is_tree = first >= num_plain
        num_keys = starts[first:last] + mine - np.int32(batch.first)
        is_gathered = (
            not is_tree
            and not is_latent
            and gathers(mine, num_keys, group, dim=dim, itemsize=itemsize)
        )
        config = attend_config(
            device, rows=longest * group, programs=num_programs(mine, group, kv_heads), dim=dim,
            itemsize=itemsize, is_gathered=is_gathered,
        )  # fmt: skip
        keys = None
        if is_gathered:
            keys = DeviceKeys(*(upload(x, device) for x in key_layout(num_keys)))
        offsets = batch.cu_seqlens[first : last + 1] - np.int32(begin)
        queries = DeviceQueries(
            cu_seqlens=upload(offsets, device),
            rows=upload(np.arange(first, last, dtype=np.int32), device),
            starts=upload(starts[first:last], device),
            blocks=upload(
                query_blocks(offsets, starts[first:last], tokens_per_block(config, group)), device
            ),
            kv_table=on_device,
            ancestors=upload(_ancestors(batch, mine), device) if is_tree else None,
            first=batch.first,
        )
        parts.append(Part(slice(begin, end), queries, config, keys))
    return DeviceTokens(
        upload(batch.positions, device), upload(batch.write_slots, device), tuple(parts)
    )


def _compact_table(batch: RaggedQueries) -> Int32Array:
    """The batch's rows of the table, as wide as the longest of them needs."""
    width = int((batch.starts + np.diff(batch.cu_seqlens)).max(initial=1))
    table: Int32Array = batch.kv_table[batch.rows, :width]
    return table


def _unroll_tails(
    batch: RaggedQueries, starts: Int32Array, table: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Trees of one node each, whose earlier nodes have KV already: the columns of a node's path
    come behind its prefix. Returns first positions and the table, as if they were rows."""
    tails = np.diff(batch.tail_offsets)[-batch.num_trees :]
    if (tails == 1).all():
        return starts, table
    starts, first = starts.copy(), len(starts) - batch.num_trees
    missing = max(int((starts[first:] + tails).max()) - table.shape[1], 0)
    table = np.pad(table, ((0, 0), (0, missing)))
    for i, token in zip(range(first, len(starts)), batch.tree_tokens, strict=True):
        seen = batch.slots_seen(token)
        length = int(batch.short_lengths[token]) + int(tails[i - first])
        table[i, batch.first : length] = seen
        starts[i] = length - 1
    return starts, table


def _ancestors(batch: RaggedQueries, counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """``DeviceQueries.ancestors`` of the nodes."""
    nodes = batch.tree_tokens
    offsets = batch.tail_offsets[nodes.start : nodes.stop + 1]
    starts = np.repeat(batch.starts[-batch.num_trees :], counts)
    lengths = np.diff(offsets)
    own = batch.tail_columns[offsets[0] : offsets[-1]] - np.repeat(starts, lengths)
    bits = np.zeros(len(nodes), np.uint64)
    owners = np.repeat(np.arange(len(nodes)), lengths)
    np.bitwise_or.at(bits, owners, np.uint64(1) << own.astype(np.uint64))
    return bits.view(np.int64)

"""Latent attention on the device against its torch twin in float64, over scattered slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hyradix.errors import ConfigError
from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.attention.triton import DeviceQueries, query_blocks, tokens_per_block
from hyradix.kernels.device_forms import DeviceTokens, Part
from hyradix.kernels.mla import reference
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.mla.triton import DeviceLatent, LatentScratch, latent_attention
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.kernels.triton_table import AttendConfig
from tests.kernels.triton_kernels.cases import NAN, error

SHAPES = {
    "odd": (6, 12, 5, 20, 33),
    "nothing shared": (1, 16, 0, 8, 16),
    "many heads": (32, 4, 2, 3, 6),
    "long rows": (3, 8, 16, 5, 272),
    "read once": (4, 6, 7, 5, 256),
}
"""H, nope, shared, V, rank."""
STARTS, COUNTS, FIRST = [9, 0, 21, 4], [6, 3, 1, 1], 2
CONFIG = AttendConfig(32, 16, 2, 4, 2)
SPLIT = AttendConfig(32, 16, 8, 4, 2)


def weights_of(shape):
    heads, nope, shared, v_dim, rank = shape
    return LatentWeights(
        num_shared=shared,
        keys=torch.randn(heads, nope, rank) / nope**0.5,
        values=torch.randn(heads, v_dim, rank) / rank**0.5,
        norm=torch.randn(rank),
        eps=1e-6,
    )


def wide(weights):
    parts = {name: getattr(weights, name).double() for name in ("keys", "values", "norm")}
    return replace(weights, **parts)


def batch_of(counts, starts, *, trees=None, first=0):
    """Ragged queries over a scattered table, its rows in no order."""
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.random.default_rng(0).permutation(np.arange(1, 141)).astype(np.int32)
    table = table.reshape(-1, 28)
    rows, starts = np.arange(len(counts), dtype=np.int32)[::-1].copy(), np.array(starts, np.int32)
    own = np.arange(cu[-1], dtype=np.int32) - np.repeat(cu[:-1], counts)
    columns = own + np.repeat(starts, counts)
    slots = table[np.repeat(rows, counts), columns].copy()
    depths = own if trees is None else trees.depths
    positions = (np.repeat(starts, counts) + depths).astype(np.int32)
    return RaggedQueries.of(cu, rows, starts, positions, slots, table, trees=trees, first=first)


def pool_of(batch, starts, width):
    """Rows behind each start; NaN wherever nobody may read before writing."""
    pool = torch.full((142, 1, width), NAN)
    for row, start in zip(batch.rows.tolist(), starts, strict=True):
        pool[batch.kv_table[row, :start]] = torch.randn(start, 1, width)
    return pool


def on_device(batch, heads, device, *, padding=0, ancestors=None, first=0):
    """With ``padding`` rows behind the real ones: slot 0, nothing seen."""
    cu = np.concatenate([batch.cu_seqlens, batch.cu_seqlens[-1] + np.arange(1, padding + 1)])
    none = np.zeros(padding, np.int32)
    arrays = {
        "cu": cu.astype(np.int32),
        "rows": np.concatenate([batch.rows, none]),
        "starts": np.concatenate([batch.starts, none - 1]),
        "blocks": query_blocks(
            cu.astype(np.int32),
            np.concatenate([batch.starts, none - 1]),
            tokens_per_block(CONFIG, heads),
        ),
        "table": batch.kv_table,
        "positions": np.concatenate([batch.positions, none]),
        "slots": np.concatenate([batch.write_slots, none]),
    }
    found = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
    queries = DeviceQueries(
        found["cu"], found["rows"], found["starts"], found["blocks"], found["table"],
        None if ancestors is None else ancestors.to(device), first,
    )  # fmt: skip
    return DeviceTokens.whole(found["positions"], found["slots"], queries, CONFIG)


def in_parts(tokens, rows, heads, config):
    """The same tokens, those from batch row ``rows`` on in a part of their own with ``config``."""
    (whole,) = tokens.parts
    cu = whole.queries.cu_seqlens.cpu().numpy()
    parts, total, border = [], int(cu[-1]), int(cu[rows])
    for there, tokens_of, made in (
        (slice(0, rows), slice(0, border), whole.config),
        (slice(rows, len(cu) - 1), slice(border, total), config),
    ):
        own = cu[there.start : there.stop + 1] - cu[there.start]
        blocks = query_blocks(
            own, whole.queries.starts[there].cpu().numpy(), tokens_per_block(made, heads)
        )
        queries = replace(
            whole.queries,
            cu_seqlens=torch.from_numpy(own).to(whole.queries.rows.device),
            rows=whole.queries.rows[there],
            starts=whole.queries.starts[there],
            blocks=torch.from_numpy(blocks).to(whole.queries.rows.device),
        )
        parts.append(Part(tokens_of, queries, made))
    return DeviceTokens(tokens.positions, tokens.write_slots, tuple(parts))


def ours(raw, projected, tokens, pool, device):
    """Outputs and the pool, in a part of larger, poisoned buffers."""
    count, heads = len(projected), raw.num_heads
    weights = DeviceLatent.of(raw, device, torch.float32)
    scratch = LatentScratch(
        count + 3, heads, raw.rank, raw.num_shared, device, torch.float32, max_parts=64
    )
    for buffer in (scratch.query, scratch.context, scratch.parts.o, scratch.parts.lse):
        buffer.fill_(NAN)
    out = torch.full((count, heads * raw.values.shape[1] + 3), NAN, device=device)
    pool = pool.clone().to(device)
    latent_attention(projected.to(device), weights, tokens, pool, scratch, out[:, 3:])
    assert out[:, :3].isnan().all()
    return out[:, 3:].cpu(), pool.cpu()


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_all_kinds_equal_the_twin(device, name, has_parts):
    """A prefill, a short one, decodes, a row that pads the batch; columns from ``FIRST`` on."""
    torch.manual_seed(0)
    raw, shape = weights_of(SHAPES[name]), SHAPES[name]
    heads, nope, shared, _, rank = shape
    starts = [max(start, FIRST) for start in STARTS]
    batch = batch_of(COUNTS, starts, first=FIRST)
    pool = pool_of(batch, starts, rank + shared)
    total = sum(COUNTS)
    projected = torch.randn(total + 2, heads * (nope + shared) + rank + shared)
    projected[total:] = NAN
    tokens = on_device(batch, heads, device, padding=2, first=FIRST)
    if has_parts:
        tokens = in_parts(tokens, 2, heads, SPLIT)
    out, written = ours(raw, projected, tokens, pool, device)
    expected_pool = pool.double()
    expected = reference.latent_attention(
        projected[:total].double(), wide(raw), batch, expected_pool
    )
    assert error(out[:total], expected) < 1e-5
    assert not out[total:].any()
    assert torch.equal(written.isnan(), expected_pool.isnan())
    assert error(written.nan_to_num(), expected_pool.nan_to_num()) < 1e-6


def test_tokens_without_a_write_slot_write_nothing_and_see_what_is_there(device):
    torch.manual_seed(1)
    raw, (heads, nope, shared, _, rank) = weights_of(SHAPES["odd"]), SHAPES["odd"]
    batch = batch_of([4], [5])
    pool = pool_of(batch, [9], rank + shared)
    silent = replace(batch, write_slots=np.where([1, 1, 0, 0], 0, batch.write_slots))
    projected = torch.randn(4, heads * (nope + shared) + rank + shared)
    tokens = on_device(silent, heads, device)
    out, written = ours(raw, projected, tokens, pool, device)
    expected_pool = pool.double()
    expected = reference.latent_attention(projected.double(), wide(raw), silent, expected_pool)
    assert error(out, expected) < 1e-5
    kept = batch.kv_table[batch.rows[0], :7]
    assert torch.equal(written[kept], pool[kept])


def test_nodes_of_draft_trees_see_their_paths(device):
    torch.manual_seed(2)
    raw, (heads, nope, shared, _, rank) = weights_of(SHAPES["odd"]), SHAPES["odd"]
    counts, starts = [5, 3], [7, 12]
    parents = np.array([-1, 0, 0, 2, 1, -1, 0, 0], np.int32)
    trees = FlatTrees.of(np.array([0, 5, 8], np.int32), parents)
    bits = []
    for node, parent in enumerate(parents.tolist()):
        begin = 0 if node < 5 else 5
        above = bits[begin + parent] if parent >= 0 else 0
        bits.append(above | 1 << (node - begin))
    batch = batch_of(counts, starts, trees=trees)
    pool = pool_of(batch, starts, rank + shared)
    projected = torch.randn(8, heads * (nope + shared) + rank + shared)
    ancestors = torch.tensor(bits, dtype=torch.int64)
    tokens = on_device(batch, heads, device, ancestors=ancestors)
    out, _ = ours(raw, projected, tokens, pool, device)
    expected = reference.latent_attention(projected.double(), wide(raw), batch, pool.double())
    assert error(out, expected) < 1e-5


def test_more_heads_than_a_block_are_refused(device):
    raw = weights_of((33, 1, 1, 1, 1))
    DeviceLatent.of(raw, device, torch.bfloat16)
    with pytest.raises(ConfigError, match="up to 32 heads"):
        DeviceLatent.of(raw, device, torch.float32)

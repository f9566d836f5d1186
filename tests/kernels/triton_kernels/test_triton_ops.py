"""Every operation of the Triton backend against torch's, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch

from hyradix.errors import ConfigError
from hyradix.kernels import ops as ops_module
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.moe.reference import ExpertWeights, Routing
from hyradix.kernels.ops import load_ops
from hyradix.kernels.rotary.reference import rotary_table
from hyradix.kernels.state_slots.reference import move_slots_
from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from tests.kernels.triton_kernels.cases import NAN
from tests.kernels.triton_kernels.ops_cases import (
    Both,
    KvPair,
    int32,
    offsets,
    with_columns,
)
from tests.support.interpreter import mend_bfloat16

DTYPES = [torch.float32, torch.bfloat16]
TREE = [-1, 0, 0, 1, 1]


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def both(request, device) -> Both:
    if device.type == "cpu":
        mend_bfloat16()
    return Both(device, request.param)


@pytest.mark.parametrize("rows", [3, 17])
def test_products_and_norms(both, rows):
    (x, ours), (residual, own_residual) = both.normal(rows, 40), both.normal(rows, 22)
    weight = both.normal(22, 40)[0].to(both.dtype) * 0.2
    scale = torch.rand(40) + 0.5
    twins = both.twin.pack_norm(scale, 1e-5), both.twin.pack_linear(weight.float())
    owns = both.ours.pack_norm(scale, 1e-5), both.ours.pack_linear(weight)
    both.check(both.ours.norm(ours, owns[0]), both.twin.norm(x, twins[0]))
    both.check(both.ours.linear(ours, owns[1]), both.twin.linear(x, twins[1]))
    both.check(both.ours.norm_linear(ours, *owns), both.twin.norm_linear(x, *twins))
    for activation in ("swiglu", "relu2"):
        expected = both.twin.norm_linear_activate(x, *twins, activation)
        both.check(both.ours.norm_linear_activate(ours, *owns, activation), expected)
    logits = both.ours.logits(ours, *owns)
    assert logits.dtype == torch.float32
    both.check(logits, both.twin.logits(x, *twins))
    for ops, given in ((both.ours, (ours, *owns)), (both.twin, (x, *twins))):
        out = torch.full((rows + 1, 22), NAN, device=ops.device)
        assert ops.logits(*given, out=out[:rows]).data_ptr() == out.data_ptr()
        assert torch.equal(out[:rows], ops.logits(*given))
        assert out[rows:].isnan().all()
    expected = both.twin.linear_add(x, twins[1], residual)
    added = both.ours.linear_add(ours, owns[1], own_residual)
    assert added.data_ptr() == own_residual.data_ptr()
    both.check(added, expected)


def test_a_router_stays_float32(both):
    x, ours = both.normal(4, 32)
    router = torch.randn(6, 32)
    logits = both.ours.linear(ours, both.ours.pack_linear(router))
    assert logits.dtype == torch.float32
    assert torch.allclose(
        logits.cpu(), both.twin.linear(x, both.twin.pack_linear(router)), atol=1e-4
    )


def test_rows_by_ids_and_indices_of_host_and_device(both):
    weight, _ = both.normal(13, 24)
    ids = int32([5, 0, 12, 5])
    own = both.ours.pack_embedding(weight.to(both.dtype))
    assert own.device.type == both.device.type
    expected = both.twin.embed(both.twin.pack_embedding(weight), ids)
    for given in (ids, torch.from_numpy(ids).to(both.device)):
        found = both.ours.embed(own, given)
        assert torch.equal(found.float().cpu(), expected)
        index = given[1:2] + 2  # row 2 of what was found
        assert torch.equal(both.ours.select(found, index).float().cpu(), expected[2:3])


def attention_weights(*, has_norm: bool, rotary_dim: int) -> AttentionWeights:
    return AttentionWeights(
        num_heads=4, num_kv_heads=2, head_dim=12, eps=1e-6, q_norm=torch.rand(12) + 0.5,
        k_norm=torch.rand(12) + 0.5, angles=rotary_table(64, rotary_dim, 100.0),
        has_norm=has_norm, has_gate=has_norm,
    )  # fmt: skip


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("what", ["rows", "decodes", "trees", "roots"])
def test_attention(both, what, has_norm):
    weights = attention_weights(has_norm=has_norm, rotary_dim=8 if has_norm else 0)
    kv, trees = KvPair(both, [7, 0, 19, 4], (2, 12)), None
    rows, starts, counts = [2, 1, 0], [19, 0, 7], [1, 13, 2]
    if what == "decodes":
        rows, starts, counts = [2, 0], [19, 7], [1, 1]
    elif what == "trees":
        trees = FlatTrees.of(offsets([5, 1]), int32([*TREE, -1]))
        rows, starts, counts = [1, 2, 0], [0, 19, 7], [11, 5, 1]
    elif what == "roots":
        trees = FlatTrees.of(offsets([1, 1]), int32([-1, -1]))
        rows, starts, counts = [3, 2, 0], [4, 19, 7], [2, 1, 1]
    batch = kv.batch(rows, starts, counts, trees)
    x, ours = both.normal(sum(counts), (8 + 4 * has_norm) * 12)
    expected = both.twin.attention(x, both.twin.pack_attention(weights), batch, kv.k[0], kv.v[0])
    found = both.ours.attention(ours, both.ours.pack_attention(weights), batch, kv.k[1], kv.v[1])
    both.check(found, expected)
    kv.check()


def test_a_node_whose_path_stands_in_any_columns(both):
    weights = attention_weights(has_norm=True, rotary_dim=8)
    kv = KvPair(both, [9, 30], (2, 12))
    trees = FlatTrees.of(offsets([1, 1]), int32([-1, -1]))
    batch = with_columns(kv.batch([1, 0], [22, 4], [1, 1], trees), [[0, 3, 0], [2]])
    x, ours = both.normal(2, 12 * 12)
    for side in (0, 1):
        for pool in (kv.k[side], kv.v[side]):
            pool.nan_to_num_(1.0)
    expected = both.twin.attention(x, both.twin.pack_attention(weights), batch, kv.k[0], kv.v[0])
    found = both.ours.attention(ours, both.ours.pack_attention(weights), batch, kv.k[1], kv.v[1])
    both.check(found, expected)


def test_attention_to_lent_memory_which_nobody_writes(both):
    weights = attention_weights(has_norm=True, rotary_dim=4)
    kv = KvPair(both, [7, 19], (2, 12))
    batch = kv.batch([0, 1, 0], [6, 18, 3], [1, 1, 1])
    x, ours = both.normal(3, 2 * 4 * 12)
    lent = [both.ours.read_only(pool[1]) for pool in (kv.k, kv.v)]
    own = both.ours.pack_attention(weights)
    expected = both.twin.attend_frozen(
        x, both.twin.pack_attention(weights), batch, kv.k[0], kv.v[0]
    )
    both.check(both.ours.attend_frozen(ours, own, batch, *lent), expected)
    kv.check()
    with pytest.raises(ValueError, match="read-only"):
        both.ours.attention(ours, own, batch, *lent)
    long = kv.batch([1], [3], [9])
    with pytest.raises(ValueError, match="its own row"):
        both.ours.attend_frozen(ours, own, long, *lent)


@pytest.mark.parametrize("with_trees", [False, True])
def test_latent_attention(both, with_trees):
    heads, nope, shared, v_dim, rank = 3, 6, 4, 5, 12

    def round_(x: torch.Tensor) -> torch.Tensor:
        return x.to(both.dtype).float()

    weights = LatentWeights(
        num_shared=shared, keys=round_(torch.randn(heads, nope, rank) / nope**0.5),
        values=round_(torch.randn(heads, v_dim, rank) / rank**0.5), norm=torch.rand(rank), eps=1e-6,
    )  # fmt: skip
    kv = KvPair(both, [7, 0, 19], (1, rank + shared))
    rows, starts, counts, trees = [2, 1, 0], [19, 0, 7], [1, 9, 2], None
    if with_trees:
        rows, starts, counts = [2, 1, 0], [19, 0, 7], [1, 3, 5]
        trees = FlatTrees.of(offsets([5]), int32(TREE))
    batch = kv.batch(rows, starts, counts, trees)
    x, ours = both.normal(sum(counts), heads * (nope + shared) + rank + shared)
    expected = both.twin.latent_attention(
        x, both.twin.pack_latent_attention(weights), batch, kv.k[0]
    )
    own = both.ours.pack_latent_attention(weights)
    both.check(both.ours.latent_attention(ours, own, batch, kv.k[1]), expected)
    kv.check()


@pytest.mark.parametrize("tokens", [2, 21])
def test_experts(both, tokens):
    routing = Routing(num_experts=5, top_k=2, has_shared_gate=True)
    logits = torch.randn(tokens, 6)
    (x, ours), (residual, own_residual) = both.normal(tokens, 24), both.normal(tokens, 24)
    up, down = (torch.randn(5, *shape) * 0.2 for shape in ((16, 24), (24, 8)))
    weights = [
        ExpertWeights(*pair, "swiglu") for pair in zip(both.pair(up), both.pair(down), strict=True)
    ]
    routes = both.twin.route(logits, both.twin.pack_routing(routing))
    own_routes = both.ours.route(logits.to(both.device), both.ours.pack_routing(routing))
    assert torch.equal(own_routes.ids.cpu().long(), routes.ids)
    assert torch.allclose(own_routes.shared.cpu(), routes.shared, atol=1e-6)
    expected = both.twin.experts(x, routes, both.twin.pack_experts(weights[0]), residual)
    own = both.ours.pack_experts(weights[1])
    both.check(both.ours.experts(ours, own_routes, own, own_residual), expected)


def test_whole_slots_move_by_numbers_of_host_or_device(both):
    tensors = [torch.randn(2, 5, 3, 4), torch.randn(1, 5, 6).to(both.dtype)]
    numbers = int32([2, -1, 3]), int32([1, 4, 0])
    results = []
    for given in (numbers, [torch.from_numpy(x).to(both.device) for x in numbers]):
        own = [x.to(both.device, copy=True) for x in tensors]
        both.ours.slot_mover(own)(*given)
        results.append([x.cpu() for x in own])
    expected = [x.clone() for x in tensors]
    move_slots_(expected, *map(torch.from_numpy, numbers))
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_scratch_is_allocated_once(device):
    both = Both(device, torch.float32)
    weights = attention_weights(has_norm=True, rotary_dim=4)
    own = both.ours.pack_attention(weights)
    reserved = both.ours.reserve(32, 4)
    assert reserved > 0
    kv = KvPair(both, [7], (2, 12))
    both.ours.attention(both.normal(1, 144)[1], own, kv.batch([0], [7], [1]), kv.k[1], kv.v[1])
    assert both.ours.reserve(32, 4) == reserved


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(ConfigError, match="compiled kernels are the CPU"):
        load_ops("compiled", device="cuda")
    monkeypatch.setattr("triton.__version__", "3.1.0")
    with pytest.raises(ConfigError, match=r"Triton 3\.4 or newer"):
        load_ops("triton")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_ops("auto", device="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        load_ops("triton")
    assert ops_module.BACKENDS[-1] == "triton"

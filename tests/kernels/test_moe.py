"""Mixtures of experts: routing and grouped products, against a loop over tokens and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing, activate
from hyradix.kernels.torch_ops import TorchOps
from tests.support.marks import needs_tiles

BACKENDS = [CompiledOps(), TorchOps()]
ROUTINGS = {
    "softmax": Routing(num_experts=8, top_k=3),
    "plain": Routing(num_experts=8, top_k=8, is_normalised=False, scale=1.5),
    "shared": Routing(num_experts=7, top_k=2, has_shared_gate=True),
    "sigmoid": Routing(num_experts=8, top_k=3, scoring="sigmoid", scale=2.5),
    "bias": Routing(num_experts=8, top_k=3, scoring="sigmoid", bias=torch.linspace(-1, 1, 8)),
    "groups": Routing(
        num_experts=12, top_k=4, scoring="sigmoid", num_groups=4, top_groups=2, scale=0.5,
        bias=torch.linspace(1, -1, 12),
    ),
}  # fmt: skip


def route(ops, logits, routing):
    """ids ascending, with their weights; the shared expert's weights."""
    found = ops.route(ops.view(logits), ops.pack_routing(routing))
    ids = torch.as_tensor(found.ids).long()
    order = ids.argsort(1)
    shared = None if found.shared is None else ops.tensor(found.shared)
    return ids.gather(1, order), ops.tensor(found.weights).gather(1, order), shared


def by_hand(row, routing):
    """Expert -> weight for one token's logits, from the definition."""
    count = routing.num_experts
    scores = row[:count].softmax(0) if routing.scoring == "softmax" else row[:count].sigmoid()
    choice = (scores if routing.bias is None else scores + routing.bias).tolist()
    size = count // routing.num_groups
    groups = [range(g * size, g * size + size) for g in range(routing.num_groups)]
    groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
    allowed = [e for group in groups[: routing.top_groups] for e in group]
    if routing.num_groups == 1:
        allowed = list(range(count))
    ids = sorted(allowed, key=lambda e: -choice[e])[: routing.top_k]
    total = sum(float(scores[e]) for e in ids) if routing.is_normalised else 1.0
    return {e: float(scores[e]) / total * routing.scale for e in ids}


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_as_defined(ops, name):
    routing = ROUTINGS[name]
    torch.manual_seed(1)
    logits = torch.randn(40, routing.num_experts + routing.has_shared_gate) * 2
    ids, weights, shared = route(ops, logits, routing)
    for row, chosen, weight in zip(logits, ids.tolist(), weights.tolist(), strict=True):
        assert dict(zip(chosen, weight, strict=True)) == pytest.approx(by_hand(row, routing))
    if routing.has_shared_gate:
        assert torch.allclose(shared[:, 0], logits[:, -1].sigmoid(), atol=1e-6)
    else:
        assert shared is None


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_faulty_row_gets_valid_experts_and_harms_no_other(ops, name):
    routing = ROUTINGS[name]
    torch.manual_seed(2)
    logits = torch.randn(3, routing.num_experts + routing.has_shared_gate)
    sound = route(ops, logits, routing)
    logits[1] = float("nan")
    ids, weights, _ = route(ops, logits, routing)
    for row in (0, 2):
        assert torch.equal(ids[row], sound[0][row])
        assert torch.equal(weights[row], sound[1][row])
    assert sorted(set(ids[1].tolist())) == ids[1].tolist()
    assert ids[1, 0] >= 0
    assert ids[1, -1] < routing.num_experts


def random_experts(activation, dtype, count=6, hidden=40, size=24):
    torch.manual_seed(3)
    rows = 2 * size if activation == "swiglu" else size
    return ExpertWeights(
        (torch.randn(count, rows, hidden) * 0.2).to(dtype),
        (torch.randn(count, hidden, size) * 0.2).to(dtype),
        activation,
    )


def token_by_token(x, ids, weights, experts, residual):
    out = torch.zeros_like(x) if residual is None else residual.clone()
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            hidden = activate(F.linear(x[t : t + 1], experts.up[e].float()), experts.activation)
            out[t] += weights[t, j] * F.linear(hidden, experts.down[e].float())[0]
    return out


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 150])
@pytest.mark.parametrize("is_added", [True, False])
def test_experts_equal_a_loop_over_tokens(ops, activation, dtype, tokens, is_added):
    """150 tokens: some experts have more than the tiles take, one has none."""
    experts = random_experts(activation, dtype)
    x, residual = torch.randn(tokens, 40), torch.randn(tokens, 40) if is_added else None
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    ids[ids == 3] = 5
    if tokens > 100:
        ids[:20, 0] = 4  # few rows beside experts of many
        ids[:20, 1] = 0
    weights = torch.rand(tokens, 2)
    routes = Routes(ids.numpy() if ops.name == "compiled" else ids, ops.view(weights), None)
    packed = ops.pack_experts(experts)
    added = None if residual is None else ops.view(residual)
    found = ops.tensor(ops.experts(ops.view(x), routes, packed, added))
    expected = token_by_token(x, ids, weights, experts, residual)
    assert torch.allclose(found, expected, atol=1e-4 if dtype == torch.float32 else 0.1)


@needs_tiles
def test_a_token_has_the_same_bits_in_any_small_batch():
    ops = BACKENDS[0]
    packed = ops.pack_experts(random_experts("swiglu", torch.float32))
    routing = ops.pack_routing(Routing(num_experts=6, top_k=2))
    x, logits = np.random.default_rng(0).standard_normal((2, 20, 40)).astype(np.float32)
    logits = np.ascontiguousarray(logits[:, :6])
    whole = ops.experts(x, ops.route(logits, routing), packed, x)
    for first, last in ((0, 1), (3, 9), (1, 20)):
        part = slice(first, last)
        alone = ops.experts(x[part], ops.route(logits[part], routing), packed, x[part])
        assert np.array_equal(alone, whole[part])

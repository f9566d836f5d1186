"""The recurrences along a sequence: chunks against the definition, and one token of it."""

from __future__ import annotations

import pytest
import torch

from hyradix.kernels.tree_recurrence.chunked import CHANNEL_CHUNK, CHUNK, chunked, naive
from hyradix.kernels.tree_recurrence.rules import KDA, RULES, Inputs, read, update

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
LENGTHS = [
    pytest.param(rule, size, tokens, id=f"{rule.name}-{tokens}")
    for rule in RULES
    for size in [CHANNEL_CHUNK if rule is KDA else CHUNK]
    for tokens in (1, size - 1, size, size + 1, 2 * size + 2, 3 * size + 2)
]


def rule_inputs(rule, tokens, *, dtype=torch.float64, rate=3.0):
    torch.manual_seed(tokens)
    groups, heads, dk, dv = 2, 4, 10, 6
    q, k = (torch.randn(tokens, groups, dk, dtype=dtype) for _ in range(2))
    if rule.has_delta:
        k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(tokens, heads, dv, dtype=dtype)
    beta = torch.rand(tokens, heads, dtype=dtype)
    g = -rate * torch.rand(tokens, heads, dk if rule.has_channel_decay else 1, dtype=dtype)
    return q, Inputs(k, v, g, beta), torch.randn(heads, dk, dv, dtype=dtype)


@pytest.mark.parametrize(("rule", "size", "tokens"), LENGTHS)
def test_chunked_equals_naive(rule, size, tokens):
    inputs = rule_inputs(rule, tokens)
    o, states = naive(rule, *inputs)
    saves = sorted({1, tokens // 2 + 1, tokens, min(tokens, size)})
    o2, final, saved = chunked(rule, *inputs, save_at=saves)
    assert torch.allclose(o2, o, atol=1e-12)
    assert torch.allclose(final, states[-1], atol=1e-12)
    for count, state in zip(saves, saved, strict=True):
        assert torch.allclose(state, states[count - 1], atol=1e-12)


@rules
def test_strong_decay_neither_overflows_nor_loses_digits(rule):
    inputs = rule_inputs(rule, 100, rate=200.0, dtype=torch.float32)
    o, final, _ = chunked(rule, *inputs)
    expected, states = naive(rule, *inputs)
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.allclose(final, states[-1], atol=1e-5)


@rules
def test_one_token_equals_naive(rule):
    q, inputs, state = rule_inputs(rule, 1)
    _, after = update(rule, state, inputs.k[0], inputs.v[0], inputs.g[0], inputs.beta[0])
    expected, states = naive(rule, q, inputs, state)
    assert torch.allclose(read(after, q[0]), expected[0])
    assert torch.allclose(after, states[0])

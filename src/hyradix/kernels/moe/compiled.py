"""Compiled parts of a mixture of experts: routing, sorting tokens by expert, small products.

Owns: the loops. Does not know: which products are small (``grouped.py`` says), norms.

Invariants:
- What a token gets depends on its own row only, summed in one order: the same bits in any batch.
- Chosen experts are valid and all different even where scores are NaN: no memory but their own is
  read.
Read next: ``grouped.py``, ``reference.py`` (the readable twin; shapes are described there).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np
from numba import prange

from hyradix.kernels.linear.compiled import BLOCK, cover
from hyradix.kernels.numba_support import compiled, exp32, sigmoid32

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TINY = np.float32(1e-20)


@compiled()
def _score(logits, is_softmax, scores):
    """scores of one token's experts."""
    if not is_softmax:
        for e in range(scores.size):
            scores[e] = sigmoid32(logits[e])
        return
    most = np.float32(-np.inf)
    for e in range(scores.size):
        most = max(most, logits[e])
    total = _ZERO
    for e in range(scores.size):
        scores[e] = exp32(logits[e] - most)
        total += scores[e]
    for e in range(scores.size):
        scores[e] /= total


@compiled()
def _best(values, is_taken):
    """The first of the greatest values that are not taken; the first not taken if all are NaN."""
    best = -1
    for i in range(values.size):
        if not is_taken[i] and (best < 0 or values[i] > values[best]):
            best = i
    return best


@compiled()
def _limit_groups(choice, num_groups, top_groups, is_taken):
    """Mark the experts of all groups but the ``top_groups`` best as taken."""
    size = choice.size // num_groups
    worth = np.empty(num_groups, np.float32)
    is_chosen = np.zeros(num_groups, np.bool_)
    for g in range(num_groups):
        inside = is_taken[g * size : (g + 1) * size]
        values = choice[g * size : (g + 1) * size]
        first = _best(values, inside)
        inside[first] = True
        worth[g] = values[first] + values[_best(values, inside)]
        inside[first] = False
    for _ in range(top_groups):
        is_chosen[_best(worth, is_chosen)] = True
    for e in range(choice.size):
        is_taken[e] = not is_chosen[e // size]


@compiled()
def route(
    logits, is_softmax, bias, num_groups, top_groups, is_normalised, scale, ids, weights, shared
):
    """``reference.route``; bias is [0] where there is none, and so is shared, [0, 0]."""
    num_experts = logits.shape[1] - shared.shape[1]
    scores = np.empty(num_experts, np.float32)
    choice = np.empty(num_experts, np.float32)
    is_taken = np.empty(num_experts, np.bool_)
    for t in range(ids.shape[0]):
        _score(logits[t], is_softmax, scores)
        for e in range(num_experts):
            choice[e] = scores[e] + bias[e] if bias.size else scores[e]
            is_taken[e] = False
        if top_groups < num_groups:
            _limit_groups(choice, num_groups, top_groups, is_taken)
        total = _TINY
        for j in range(ids.shape[1]):
            best = _best(choice, is_taken)
            is_taken[best] = True
            ids[t, j] = best
            weights[t, j] = scores[best]
            total += scores[best]
        factor = scale / total if is_normalised else scale
        for j in range(ids.shape[1]):
            weights[t, j] *= factor
        if shared.size:
            shared[t, 0] = sigmoid32(logits[t, num_experts])


@compiled()
def group(ids, num_experts, order, places, offsets):
    """Pairs (token, choice) expert by expert, in token order within each.

    order ``[T k]``: the token at each place; places ``[T, k]``: where each pair went; expert e has
    the places offsets[e] : offsets[e+1].
    """
    offsets[:] = 0
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            offsets[ids[t, j] + 1] += 1
    for e in range(num_experts):
        offsets[e + 1] += offsets[e]
    following = offsets[:-1].copy()
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            place = following[ids[t, j]]
            following[ids[t, j]] = place + 1
            order[place] = t
            places[t, j] = place


@compiled(parallel=True)
def multiply(weight, experts, offsets, x, out):
    """out[places of e] = x[places of e] @ weight[e].T for the given experts; weight [E, O, I]."""
    total = weight.shape[1]
    num_blocks = (total + BLOCK - 1) // BLOCK
    for task in prange(experts.size * num_blocks):
        expert = experts[np.int64(task) // num_blocks]
        first = (np.int64(task) % num_blocks) * BLOCK
        last = min(total, first + BLOCK)
        a, b = offsets[expert], offsets[expert + 1]
        cover(weight[expert], first, last, x[a:b], out[a:b])


@compiled()
def combine(y, places, weights, residual, out):
    """out[t] = residual[t] + sum_j weights[t, j] y[places[t, j]], j ascending.

    residual: ``[0, 0]`` where nothing is added.
    """
    size = out.shape[1]
    for t in range(out.shape[0]):
        target = out[t]
        for c in range(size):
            target[c] = residual[t, c] if residual.size else _ZERO
        for j in range(places.shape[1]):
            source, weight = y[places[t, j]], weights[t, j]
            for c in range(size):
                target[c] += weight * source[c]

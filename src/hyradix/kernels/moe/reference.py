"""A mixture of experts in torch: which experts a token goes to, and what they add to it.

Owns: routing, and the products of each expert with its own tokens. Does not know: shared experts
(the layer adds them), norms, residual scales.

Invariants:
- One product per expert that is hit, none per token.
- A token's chosen experts are valid and all different, whatever its logits are (NaN included).
Read next: ``grouped.py`` (the fast twin), ``../../layers/moe.py`` (the caller).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hyradix.kernels.activation.reference import Activation, activate

Scoring = Literal["softmax", "sigmoid"]
TINY = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How router logits become experts and weights: E experts, k of them for each token.

    scoring: a softmax over all experts or a sigmoid of each. bias: ``float32[E]``, added to the
    scores for choosing only. Of ``num_groups`` equal groups only the experts of the ``top_groups``
    best can be chosen (a group is as good as the sum of its two best). is_normalised: the weights
    of a token are divided by their sum; ``scale`` multiplies them afterwards. has_shared_gate: the
    logits have one more column, whose sigmoid weighs the shared expert.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    bias: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    is_normalised: bool = True
    scale: float = 1.0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Routes:
    """ids: ``[T, k]`` integers; weights: ``float32[T, k]``; shared: ``float32[T, 1]`` or None.

    Arrays of the backend's kind.
    """

    ids: Any
    weights: Any
    shared: Any


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Float32 or bfloat16. up: ``[E, 2I, H]`` (gates, then ups) or, for relu2, ``[E, I, H]``.

    down: ``[E, H, I]``.
    """

    up: torch.Tensor
    down: torch.Tensor
    activation: Activation


def route(logits: torch.Tensor, routing: Routing) -> Routes:
    """Router logits ``[T, E]`` (and the shared gate's column) -> ``Routes``."""
    own = logits[:, : routing.num_experts]
    scores = own.softmax(1) if routing.scoring == "softmax" else own.sigmoid()
    choice = scores if routing.bias is None else scores + routing.bias
    if routing.top_groups < routing.num_groups:
        grouped = choice.unflatten(1, (routing.num_groups, -1))
        best = grouped.topk(2, dim=2).values.sum(2).topk(routing.top_groups, dim=1).indices
        is_out = torch.ones(best.shape[0], routing.num_groups, dtype=torch.bool)
        is_out.scatter_(1, best, False)
        choice = grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, dim=1).indices
    weights = scores.gather(1, ids)
    if routing.is_normalised:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    shared = logits[:, routing.num_experts :].sigmoid() if routing.has_shared_gate else None
    return Routes(ids, weights * routing.scale, shared)


def experts(
    x: torch.Tensor, routes: Routes, weights: ExpertWeights, residual: torch.Tensor | None
) -> torch.Tensor:
    """residual + each token's weighted sum of its experts: x ``[T, H]`` -> ``[T, H]``."""
    num_tokens, top_k = routes.ids.shape
    flat = routes.ids.flatten()
    order = flat.argsort(stable=True)  # pairs (token, choice), expert by expert
    ends = flat.bincount(minlength=weights.up.shape[0]).cumsum(0).tolist()
    y = x.new_empty(num_tokens * top_k, weights.down.shape[1])
    first = 0
    for expert, last in enumerate(ends):
        if last > first:
            pairs = order[first:last]
            hidden = _product(x[pairs // top_k], weights.up[expert])
            y[pairs] = _product(activate(hidden, weights.activation), weights.down[expert])
        first = last
    summed = torch.einsum("tkh,tk->th", y.unflatten(0, (num_tokens, top_k)), routes.weights)
    return summed if residual is None else residual + summed


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)

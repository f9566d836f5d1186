"""A mixture of experts. Owns: its weights, and how routed and shared experts add up.

x + routed(norm(x)) + shared(norm(x)). What a family sets:
- ``Routing`` (``kernels/moe/reference.py``): softmax or sigmoid scores, correction bias, group
  limits, normalised weights, their scale (a residual multiplier goes in here and into ``shared``);
- ``router`` ``[E, hidden]``; with ``has_shared_gate`` one more row, the shared expert's gate;
- ``ExpertWeights``: all experts stacked, with gates (swiglu) or without (relu2);
- ``shared``: an ``Mlp`` or None; its size need not be the experts';
- ``latent``: products into and out of the (smaller) width that the experts work on, or None.

The router stays float32 whatever the experts are: a rounded score is another expert.
Read next: ``kernels/moe``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.moe.reference import ExpertWeights, Routing
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.mlp import Mlp
from hyradix.layers.norm import RmsNorm


class Moe:
    """See the module. latent: ``[latent, hidden]`` and ``[hidden, latent]``."""

    def __init__(
        self,
        ops: Ops,
        router: torch.Tensor,
        routing: Routing,
        experts: ExpertWeights,
        *,
        shared: Mlp | None = None,
        latent: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._ops = ops
        self._router = ops.pack_linear(router.float())
        self._routing = ops.pack_routing(routing)
        self._experts = ops.pack_experts(experts)
        self._shared = shared
        self._latent = None if latent is None else [ops.pack_linear(part) for part in latent]

    def forward(self, x: Array, norm: RmsNorm) -> Array:
        """``[T, hidden]`` -> x + MoE(norm(x)), ``[T, hidden]``."""
        ops = self._ops
        normed = ops.norm(x, norm.packed)
        routes = ops.route(ops.linear(normed, self._router), self._routing)
        if self._shared is not None:
            x = self._shared.add(normed, routes.shared, x)
        if self._latent is None:
            return ops.experts(normed, routes, self._experts, x)
        into, out_of = self._latent
        mixed = ops.experts(ops.linear(normed, into), routes, self._experts, None)
        return ops.linear_add(mixed, out_of, x)

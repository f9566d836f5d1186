"""Products, norms, experts of the Triton backend: all that looks at one token at a time.

Owns: which products are fused kernels (few rows) and which torch's own, the scratch of a backend.
Does not know: batches.

Invariants:
- Weights are on the device, bfloat16 or float32; what a product returns has the weight's type.
- bfloat16 products sum in float32. float32 products are torch's, never in tf32.
- The residual stream is one piece of memory that ``linear_add`` adds to.
Read next: ``linear/triton.py``, ``triton_ops.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.activation.triton import swiglu
from hyradix.kernels.embedding.triton import embed
from hyradix.kernels.linear.triton import MAX_ROWS, NUM_PARTS, LinearScratch, few_rows_linear
from hyradix.kernels.memory import upload
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.moe.triton import DeviceExperts, ExpertScratch, experts
from hyradix.kernels.moe.triton_routing import DeviceRouting, route
from hyradix.kernels.rms_norm.triton import add_rms_norm
from hyradix.kernels.triton_scratch import Scratch
from hyradix.kernels.triton_support import has_descriptors
from hyradix.kernels.triton_table import max_fused_rows

Norm = tuple[torch.Tensor, float]
MAX_EXPERT_TOKENS = 4096
"""More tokens than these go through the experts in turns."""


class DenseOps:
    """See ``ops.Ops``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._scratch = Scratch(device)
        self._scratch.declare(LinearScratch, by_row=True, least=NUM_PARTS)
        self._top_k = 0  # of the routing that was packed last; its experts follow
        if device.type == "cuda":
            _sum_in_float32()

    def pack_embedding(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device)

    def embed(
        self, weight: torch.Tensor, token_ids: npt.NDArray[np.int32] | torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(token_ids, torch.Tensor):
            token_ids = upload(token_ids, self.device)
        out = torch.empty(token_ids.shape[0], weight.shape[1], dtype=self.dtype, device=self.device)
        return embed(weight, token_ids, out)

    def select(self, x: torch.Tensor, index: npt.NDArray[np.int32] | torch.Tensor) -> torch.Tensor:
        if not isinstance(index, torch.Tensor):
            index = upload(index, self.device)
        return x.index_select(0, index)

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device).contiguous()

    def pack_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return weight.to(self.device, torch.float32).contiguous(), eps

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _normed(x, norm, x.dtype)

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: torch.Tensor) -> torch.Tensor:
        if _is_fused(x, weight):
            weights, eps = norm
            return few_rows_linear(x, weight, _rows(x, weight.shape[0]), norm=weights, eps=eps)
        return F.linear(_normed(x, norm, weight.dtype), weight)

    def norm_linear_activate(
        self, x: torch.Tensor, norm: Norm, weight: torch.Tensor, activation: Activation
    ) -> torch.Tensor:
        if activation == "swiglu" and _is_fused(x, weight):
            weights, eps = norm
            out = _rows(x, weight.shape[0] // 2)
            return few_rows_linear(x, weight, out, norm=weights, eps=eps, is_swiglu=True)
        return self.activate(self.norm_linear(x, norm, weight), activation)

    def logits(
        self, x: torch.Tensor, norm: Norm, weight: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        if _is_fused(x, weight):
            weights, eps = norm
            return few_rows_linear(x, weight, out, norm=weights, eps=eps)
        normed = _normed(x, norm, weight.dtype)
        if weight.dtype == torch.float32:
            return torch.mm(normed, weight.t(), out=out)
        if x.is_cuda:
            wide: torch.Tensor = torch.mm(normed, weight.t(), out_dtype=torch.float32, out=out)
            return wide
        return out.copy_(F.linear(normed, weight))

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if _is_fused(x, weight):
            return few_rows_linear(x, weight, _rows(x, weight.shape[0]), scratch=self._parts())
        return F.linear(x.to(weight.dtype), weight)

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        if _is_fused(x, weight):
            return few_rows_linear(x, weight, residual, residual=residual, scratch=self._parts())
        return residual.addmm_(x.to(weight.dtype), weight.t())

    def _parts(self) -> LinearScratch:
        found: LinearScratch = self._scratch.get(LinearScratch, NUM_PARTS)
        return found

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation == "relu2":
            return F.relu(x).square_()
        return swiglu(x, _rows(x, x.shape[1] // 2))

    def pack_routing(self, routing: Routing) -> DeviceRouting:
        self._top_k = routing.top_k
        return DeviceRouting.of(routing, self.device)

    def route(self, logits: torch.Tensor, routing: DeviceRouting) -> Routes:
        return route(logits, routing)

    def pack_experts(self, weights: ExpertWeights) -> DeviceExperts:
        packed = DeviceExperts.of(weights, self.device, self.dtype)
        sizes = (self._top_k, packed.num_experts, packed.hidden, packed.width)
        self._scratch.declare(self._expert_scratch, *sizes, by_row=False)
        return packed

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: DeviceExperts,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        sizes = (routes.ids.shape[1], weights.num_experts, weights.hidden, weights.width)
        scratch = self._scratch.get(self._expert_scratch, x.shape[0], *sizes)
        return experts(x, routes, weights, residual, scratch, out=residual)

    def _expert_scratch(
        self, capacity: int, top_k: int, count: int, hidden: int, width: int, device: torch.device
    ) -> ExpertScratch:
        capacity = min(capacity, MAX_EXPERT_TOKENS)
        return ExpertScratch(capacity, top_k, count, hidden, width, device, self.dtype)


def _sum_in_float32() -> None:
    """Torch's own products on a GPU: float32 as it is, partial sums of bfloat16 in float32."""
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "ieee"
    else:  # the name before torch 2.9
        matmul.allow_tf32 = False


def _is_fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if x.shape[0] > MAX_ROWS:
        return False
    has_tiles = has_descriptors(x.device)
    few = x.shape[0] <= max_fused_rows(x.device, weight.shape[0], has_descriptors=has_tiles)
    return few and x.dtype == weight.dtype == torch.bfloat16


def _rows(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], size)


def _normed(x: torch.Tensor, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
    weights, eps = norm
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    result: Any = add_rms_norm(x, None, weights, eps, x, out)
    normed: torch.Tensor = result
    return normed

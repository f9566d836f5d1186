"""The compiled backend: numba kernels on views of torch tensors, torch where BLAS is faster.

Owns: which form runs (one thread or all, compiled or BLAS), the layout of packed weights.
Does not know: layers, models.
Invariant: what a row gets does not depend on that choice beyond rounding.
Read next: ``gated_delta_net/compiled.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from hyradix.kernels import numba_support
from hyradix.kernels.attention import compiled as attention_kernels
from hyradix.kernels.attention.reference import AttentionWeights, RaggedQueries, attend_row
from hyradix.kernels.gated_delta_net import compiled as mixer_kernels
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.linear import compiled as linear_kernels
from hyradix.kernels.linear.packed import PackedLinear
from hyradix.kernels.rms_norm import compiled as norm_kernels
from hyradix.kernels.swiglu import compiled as swiglu_kernels

_PARALLEL_FROM = 1 << 15
"""Elements of work below which waking another thread costs more than it saves."""
Array = np.ndarray[Any, Any]


class RowMajorLinear:
    """A weight ``[O, I]`` kept once, seen by torch and by the kernels."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.contiguous()
        bits = self.weight if weight.dtype == torch.float32 else self.weight.view(torch.uint16)
        self.array: Array = bits.numpy()
        self.outputs = weight.shape[0]


class CompiledOps:
    """See ``ops.Ops``."""

    name = "compiled"

    def __init__(self) -> None:
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
        self._has_tiles = linear_kernels.is_supported()
        self._parallel_from: float = _PARALLEL_FROM

    def set_num_threads(self, num_threads: int) -> None:
        numba_support.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        for threshold in (-1, math.inf, _PARALLEL_FROM):  # all threads, one, as it will be
            self._parallel_from = threshold
            run()

    def pack_linear(self, weight: torch.Tensor) -> RowMajorLinear | PackedLinear:
        return RowMajorLinear(weight) if self._has_tiles else PackedLinear(weight)

    def linear(
        self,
        x: torch.Tensor,
        weight: RowMajorLinear | PackedLinear,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(weight, PackedLinear):
            return weight.multiply(x, residual)
        if x.shape[0] <= linear_kernels.MAX_ROWS:
            y = torch.empty(x.shape[0], weight.outputs)
            if residual is None:
                linear_kernels.multiply(weight.array, x.numpy(), y.numpy())
            else:
                linear_kernels.multiply_add(weight.array, x.numpy(), residual.numpy(), y.numpy())
            return y
        y = torch.nn.functional.linear(x.to(weight.weight.dtype), weight.weight).float()
        return y if residual is None else y.add_(residual)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        is_large = x.numel() > self._parallel_from
        kernel = norm_kernels.rms_norm_parallel if is_large else norm_kernels.rms_norm_serial
        kernel(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        is_large = out.numel() > self._parallel_from
        kernel = swiglu_kernels.swiglu_parallel if is_large else swiglu_kernels.swiglu_serial
        kernel(gate_up.numpy(), out.numpy())
        return out

    def pack_mixer(self, weights: MixerWeights) -> tuple[Any, ...]:
        """Arguments 3..: conv as [Hk, K, channels of a group], then the small vectors."""
        heads = weights.num_k_heads
        num_v_heads, dv = weights.dt_bias.numel(), weights.norm.numel()
        channels, width = weights.conv.shape
        key_dim = (channels - num_v_heads * dv) // 2
        q, k, v = weights.conv.split([key_dim, key_dim, num_v_heads * dv])
        parts = [x.reshape(heads, -1, width).transpose(1, 2) for x in (q, k, v)]
        conv = torch.cat(parts, dim=2).contiguous().numpy()
        vectors = (weights.decay_rate, weights.dt_bias, weights.norm)
        return (heads, conv, *(x.contiguous().numpy() for x in vectors), np.float32(weights.eps))

    def mix(
        self,
        projected: torch.Tensor,
        weights: tuple[Any, ...],
        batch: RaggedStates,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        heads, conv, decay_rate, dt_bias, norm, eps = weights
        out = torch.empty(projected.shape[0], state.shape[1] * state.shape[3])
        is_large = projected.shape[0] * state[0].numel() > self._parallel_from
        kernel = mixer_kernels.mix_parallel if is_large else mixer_kernels.mix_serial
        kernel(
            projected.numpy(), batch.cu_seqlens, batch.slots, heads, conv, conv_state.numpy(),
            state.numpy(), decay_rate, dt_bias, norm, eps, batch.save_offsets, batch.save_at,
            batch.save_slots, out.numpy(),
        )  # fmt: skip
        return out

    def pack_attention(self, weights: AttentionWeights) -> AttentionWeights:
        return weights

    def attention(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: RaggedQueries,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        tokens = projected.shape[0]
        q = torch.empty(tokens, weights.num_heads, weights.head_dim)
        is_large = projected.numel() > self._parallel_from
        kernel = attention_kernels.prepare_parallel if is_large else attention_kernels.prepare_serial
        kernel(
            projected.numpy(), batch.positions, batch.write_slots, weights.q_norm.numpy(),
            weights.k_norm.numpy(), np.float32(weights.eps), weights.angles.numpy(),
            k_pool.numpy(), v_pool.numpy(), q.numpy(),
        )  # fmt: skip
        out = torch.empty(tokens, weights.num_heads * weights.head_dim)
        if len(batch.short_tokens):
            work = int(batch.short_lengths.sum()) * out.shape[1]
            is_large = work > 4 * self._parallel_from
            decode = attention_kernels.decode_parallel if is_large else attention_kernels.decode_serial
            decode(
                q.numpy(), batch.short_tokens, batch.short_rows, batch.short_lengths,
                batch.kv_table, k_pool.numpy(), v_pool.numpy(), projected.numpy(), out.numpy(),
            )  # fmt: skip
        for i in batch.long_rows:
            piece = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
            slots, start = batch.kv_table[batch.rows[i]], int(batch.starts[i])
            o = attend_row(q[piece], slots, start, k_pool, v_pool).flatten(1)
            gate = projected[piece, -out.shape[1] :].sigmoid()
            torch.mul(o, gate, out=out[piece])
        return out

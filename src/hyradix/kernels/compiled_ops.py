"""The compiled backend: numba kernels on numpy arrays, torch where BLAS is faster.

Owns: which form runs (one thread or all, compiled or BLAS), the layout of packed weights.
Does not know: layers, models.
Invariant: what a row gets does not depend on that choice beyond rounding.
Read next: ``gated_delta_net/compiled.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels import compiled_trees, numba_support
from hyradix.kernels.activation import compiled as activation_kernels
from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.attention import compiled as attention_kernels
from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import AttentionWeights, attend_row, check_short
from hyradix.kernels.gated_delta_net import compiled as mixer_kernels
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.packed import PackedKda
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.linear import compiled as linear_kernels
from hyradix.kernels.linear.packed import PackedLinear
from hyradix.kernels.mamba2.packed import PackedMamba2
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.mla import compiled as latent_kernels
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.moe import grouped
from hyradix.kernels.moe.grouped import Grouping, PackedExperts, PackedRouting
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.ops import SlotMover
from hyradix.kernels.rms_norm import compiled as norm_kernels
from hyradix.kernels.state_slots.reference import move_slots_
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

_PARALLEL_FROM = 1 << 15
"""Elements of work below which waking another thread costs more than it saves."""
Array = npt.NDArray[np.float32]
_NOTHING: Array = np.zeros((0, 0), np.float32)
"""In place of a residual or of gates: nothing is added, nothing is gated."""
Norm = tuple[Array, np.float32]


class RowMajorLinear:
    """A weight ``[O, I]`` kept once, multiplied by tiles (few rows of x) or by BLAS (many).

    Where the CPU is not one that the tiles are made for, torch multiplies always.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_outputs = weight.shape[0]
        self.has_tiles = linear_kernels.is_supported()
        self.array: Any = None
        if self.has_tiles:
            self._weight = weight.contiguous()
            is_plain = weight.dtype == torch.float32
            self.array = (self._weight if is_plain else self._weight.view(torch.uint16)).numpy()
        else:
            self._packed = PackedLinear(weight)

    def multiply(self, x: Array, residual: Array) -> Array:
        """Many rows: ``[T, I]`` -> ``[T, O]``, plus residual unless that is ``_NOTHING``."""
        tensor = torch.from_numpy(x)
        added = None if residual is _NOTHING else torch.from_numpy(residual)
        if not self.has_tiles:
            return self._packed.multiply(tensor, added).numpy()
        if added is not None and self._weight.dtype == torch.float32:
            return torch.addmm(added, tensor, self._weight.T).numpy()
        y = torch.nn.functional.linear(tensor.to(self._weight.dtype), self._weight).float()
        return (y if added is None else y.add_(added)).numpy()


class CompiledOps:
    """See ``ops.Ops``."""

    name = "compiled"
    device = torch.device("cpu")
    dtype = torch.float32
    appends_roots = False
    takes_device_forms = False

    def __init__(self) -> None:
        numba_support.prefer_openmp()
        self._parallel_from: float = _PARALLEL_FROM

    def set_num_threads(self, num_threads: int) -> None:
        numba_support.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        for threshold in (-1, math.inf, _PARALLEL_FROM):  # all threads, one, as it will be
            self._parallel_from = threshold
            run()

    def reserve(self, max_tokens: int, max_rows: int) -> int:
        return 0

    def slot_mover(self, tensors: Sequence[torch.Tensor]) -> SlotMover:
        return partial(move_slots_, tensors)

    def view(self, tensor: torch.Tensor) -> Array:
        return tensor.numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def read_only(self, array: Array) -> Array:
        lent = array.view()
        lent.flags.writeable = False
        return lent

    def pack_embedding(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def embed(self, weight: torch.Tensor, token_ids: npt.NDArray[np.int32]) -> Array:
        return weight.index_select(0, torch.from_numpy(token_ids)).float().numpy()

    def select(self, x: Array, index: npt.NDArray[np.int32]) -> Array:
        return x[index]

    def pack_linear(self, weight: torch.Tensor) -> RowMajorLinear:
        return RowMajorLinear(weight)

    def pack_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return weight.contiguous().numpy(), np.float32(eps)

    def norm(self, x: Array, norm: Norm) -> Array:
        normed = np.empty_like(x)
        norm_kernels.rms_norm(x, *norm, normed)
        return normed

    def norm_linear(self, x: Array, norm: Norm, weight: RowMajorLinear) -> Array:
        return self.linear_add(self.norm(x, norm), weight, _NOTHING)

    def linear(self, x: Array, weight: RowMajorLinear) -> Array:
        return self.linear_add(x, weight, _NOTHING)

    def norm_linear_activate(
        self, x: Array, norm: Norm, weight: RowMajorLinear, activation: Activation
    ) -> Array:
        return self.activate(self.norm_linear(x, norm, weight), activation)

    def logits(
        self, x: Array, norm: Norm, weight: RowMajorLinear, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = torch.from_numpy(self.norm_linear(x, norm, weight))
        return found if out is None else out.copy_(found)

    def linear_add(self, x: Array, weight: RowMajorLinear, residual: Array) -> Array:
        if self._is_small(x, weight):
            out = np.empty((x.shape[0], weight.num_outputs), np.float32)
            linear_kernels.multiply(weight.array, x, residual, out)
            return out
        return weight.multiply(x, residual)

    def activate(self, x: Array, activation: Activation) -> Array:
        if activation == "relu2":
            positive = np.maximum(x, np.float32(0.0))
            return np.multiply(positive, positive, out=positive)
        out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
        is_large = out.size > self._parallel_from
        kernel = (
            activation_kernels.swiglu_parallel if is_large else activation_kernels.swiglu_serial
        )
        kernel(x, out)
        return out

    def pack_routing(self, routing: Routing) -> PackedRouting:
        return PackedRouting(routing)

    def route(self, logits: Array, routing: PackedRouting) -> Routes:
        return grouped.route(logits, routing)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        return PackedExperts(weights)

    def experts(
        self, x: Array, routes: Routes, weights: PackedExperts, residual: Array | None
    ) -> Array:
        grouping = Grouping(routes.ids, weights.num_experts)
        hidden = weights.up.multiply(x[grouping.order], grouping.offsets)
        hidden = self.activate(hidden, weights.activation)
        y = weights.down.multiply(hidden, grouping.offsets)
        return grouped.combine(y, grouping, routes.weights, residual)

    def _is_small(self, x: Array, weight: RowMajorLinear) -> bool:
        """Whether the tiles multiply; while everything is being compiled, either may."""
        few = x.shape[0] <= linear_kernels.MAX_ROWS and self._parallel_from != math.inf
        return weight.has_tiles and few

    def pack_mixer(self, weights: MixerWeights | Mamba2Weights) -> tuple[Any, ...] | PackedMamba2:
        """Convolution weights as [Hk, K, channels of a group], then the small vectors."""
        if isinstance(weights, Mamba2Weights):
            return PackedMamba2(weights)
        heads = weights.num_k_heads
        num_v_heads, dv = weights.dt_bias.numel(), weights.norm.numel()
        channels, width = weights.conv.shape
        key_dim = (channels - num_v_heads * dv) // 2
        pieces = (
            weights.conv[:key_dim],
            weights.conv[key_dim : 2 * key_dim],
            weights.conv[2 * key_dim :],
        )
        parts = [x.reshape(heads, -1, width).transpose(1, 2) for x in pieces]
        conv = torch.cat(parts, dim=2).contiguous().numpy()
        vectors = (weights.decay_rate, weights.dt_bias, weights.norm)
        return (heads, conv, *(x.contiguous().numpy() for x in vectors), np.float32(weights.eps))

    def mix(
        self,
        projected: Array,
        weights: tuple[Any, ...] | PackedMamba2,
        batch: RaggedStates,
        conv_state: Array,
        state: Array,
    ) -> Array:
        if isinstance(weights, PackedMamba2):
            threshold = self._parallel_from
            return weights.mix(projected, batch, conv_state, state, parallel_from=threshold)
        heads, conv, decay_rate, dt_bias, norm, eps = weights
        num_v_heads, dk, dv = state.shape[1:]
        out = np.empty((projected.shape[0], num_v_heads * dv), np.float32)
        is_large = out.size * dk > self._parallel_from
        kernel = mixer_kernels.mix_parallel if is_large else mixer_kernels.mix_serial
        kernel(
            projected, batch.cu_seqlens, batch.slots, heads, conv, conv_state, state, decay_rate,
            dt_bias, norm, eps, batch.save_offsets, batch.save_at, batch.save_slots, out,
        )  # fmt: skip
        return out

    def mix_trees(
        self,
        projected: Array,
        weights: tuple[Any, ...] | PackedMamba2,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        if isinstance(weights, PackedMamba2):
            weights.mix_trees(projected, trees, conv_state, state, spec, out)
            return
        compiled_trees.mix_trees(
            projected, weights, trees, conv_state, state, spec, out, self._parallel_from
        )

    def copy_nodes(self, arrays: StateArrays, moves: Moves) -> None:
        compiled_trees.copy_nodes(arrays, moves, self._parallel_from)

    def replay(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        compiled_trees.replay(rule, arrays, moves, self._parallel_from)

    def fold(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        compiled_trees.fold(arrays, moves, self._parallel_from)

    def move_rows(
        self,
        array: Array,
        rows: npt.NDArray[np.int32],
        sources: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
    ) -> None:
        compiled_trees.move_rows(array, rows, sources, targets)

    def pack_kda(self, weights: KdaWeights) -> PackedKda:
        return PackedKda(weights)

    def mix_kda(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        weights: PackedKda,
        batch: RaggedStates,
        conv_state: Array,
        state: Array,
    ) -> Array:
        threshold = self._parallel_from
        return weights.mix(
            projected, forget, gate, batch, conv_state, state, parallel_from=threshold
        )

    def mix_kda_trees(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        weights: PackedKda,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        weights.mix_trees(projected, forget, gate, trees, conv_state, state, spec, out)

    def pack_attention(self, weights: AttentionWeights) -> tuple[Any, ...]:
        arrays = (x.contiguous().numpy() for x in (weights.q_norm, weights.k_norm))
        form = (weights.num_heads, weights.head_dim, weights.has_gate)
        eps = np.float32(weights.eps if weights.has_norm else -1.0)
        return (form, *arrays, eps, weights.angles.numpy())

    def attention(
        self,
        projected: Array,
        weights: tuple[Any, ...],
        batch: RaggedQueries,
        k_pool: Array,
        v_pool: Array,
        wanted: WantedTokens | None = None,
    ) -> Array:
        if not (k_pool.flags.writeable and v_pool.flags.writeable):
            raise ValueError("this memory is read-only: attention would write to it")
        (heads, dim, has_gate), *rest = weights
        q = np.empty((projected.shape[0], heads, dim), np.float32)
        attention_kernels.prepare(
            projected, batch.positions, batch.write_slots, *rest, k_pool, v_pool, q
        )
        gates = projected if has_gate else _NOTHING
        if wanted is not None:
            q, batch = q[wanted.index], wanted.queries
            if has_gate:
                gates = projected[wanted.index, -heads * dim :]
        out = np.empty((q.shape[0], heads * dim), np.float32)
        if len(batch.short_tokens):
            self._attend_short(gates, q, batch, k_pool, v_pool, out)
        if batch.long_rows:
            _attend_long(gates, q, batch, k_pool, v_pool, out)
        return out

    def attend_frozen(
        self, projected: Array, weights: tuple[Any, ...], batch: RaggedQueries, k: Array, v: Array
    ) -> Array:
        check_short(batch)
        (heads, dim, _), q_norm, _, eps, angles = weights
        q = np.empty((projected.shape[0], heads, dim), np.float32)
        out = np.empty((projected.shape[0], heads * dim), np.float32)
        attention_kernels.prepare_queries(projected, batch.positions, q_norm, eps, angles, q)
        self._attend_short(projected, q, batch, self.read_only(k), self.read_only(v), out)
        return out

    def _attend_short(
        self, projected: Array, q: Array, batch: RaggedQueries, k: Array, v: Array, out: Array
    ) -> None:
        work = (int(batch.short_lengths.sum()) + len(batch.tail_columns)) * out.shape[1]
        is_large = work > 4 * self._parallel_from
        decode = attention_kernels.decode_parallel if is_large else attention_kernels.decode_serial
        decode(
            q, batch.short_tokens, batch.short_rows, batch.first, batch.short_lengths,
            batch.tail_offsets, batch.tail_columns, batch.kv_table, k, v, projected, out,
        )  # fmt: skip

    def pack_latent_attention(self, weights: LatentWeights) -> tuple[LatentWeights, Array]:
        return weights, weights.norm.contiguous().numpy()

    def latent_attention(
        self,
        projected: Array,
        weights: tuple[LatentWeights, Array],
        batch: RaggedQueries,
        pool: Array,
        wanted: WantedTokens | None = None,
    ) -> Array:
        return latent_kernels.attend(
            projected, weights, batch, pool, wanted, parallel_from=self._parallel_from
        )


def _attend_long(
    projected: Array, q: Array, batch: RaggedQueries, k_pool: Array, v_pool: Array, out: Array
) -> None:
    """Rows with many queries: torch's blocked attention, then the gate (if there is any)."""
    arrays = (projected, q, k_pool, v_pool, out)
    gates, queries, keys, values, target = map(torch.from_numpy, arrays)
    for i in batch.long_rows:
        piece, slots, start = batch.row(i)
        attended = attend_row(queries[piece], slots, start, keys, values).flatten(1)
        if projected is _NOTHING:
            target[piece] = attended
        else:
            torch.mul(attended, gates[piece, -out.shape[1] :].sigmoid(), out=target[piece])

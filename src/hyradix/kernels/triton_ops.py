"""The Triton backend: a forward whose activations, pools and weights stay on one device.

Owns: which kernel each operation is, the scratch and the forms of a step that they share.
Does not know: layers, models, who makes device forms.

Invariants:
- Of device forms (``device_forms.py``) nothing is waited for and nothing comes from the host: a
  forward over them can be captured in a CUDA graph after ``reserve``. Host forms are converted once
  a step.
- Activations have the weights' type; states, u, k and gates of a log are float32.
- What has no kernel (modes ``snapshot`` and ``replay``, some families) runs through the references.
Read next: ``triton_dense.py``, ``triton_families.py``, ``triton_batches.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention import triton as attention_kernels
from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.attention.reference import AttentionWeights, check_short
from hyradix.kernels.attention.triton import AttendScratch
from hyradix.kernels.attention.triton_write import write_kv
from hyradix.kernels.device_forms import DeviceRoots, DeviceRows, DeviceTokens
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.memory import ReadOnly, moved, upload
from hyradix.kernels.mla import reference as latent_reference
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.moe import reference as moe_reference
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.ops import SlotMover
from hyradix.kernels.state_slots.triton import Registry, move_slots_
from hyradix.kernels.tree_recurrence import keeping
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves, copy_nodes_, fold_
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from hyradix.kernels.triton_batches import Batches, TokenForms, Tokens
from hyradix.kernels.triton_dense import DenseOps
from hyradix.kernels.triton_families import DeviceMixer, Inputs, device_mixer
from hyradix.kernels.triton_scratch import Scratch

Int32Array = npt.NDArray[np.int32]
Queries = RaggedQueries | DeviceTokens
LEAST_PARTS = 1024
"""(token, split) pairs of attention that there is scratch for, at least."""


class TritonOps(DenseOps):
    """See ``ops.Ops``."""

    name = "triton"
    appends_roots = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.takes_device_forms = True  # until something without a kernel is packed
        self._scratch = Scratch(device)
        self._batches = Batches(device)
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def reserve(self, max_tokens: int, max_rows: int) -> int:
        return self._scratch.reserve(max_tokens, max_rows)

    def slot_mover(self, tensors: Sequence[torch.Tensor]) -> SlotMover:
        return partial(_move_slots, Registry([x for x in tensors if x.numel()]), self.device)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        return array

    def read_only(self, array: torch.Tensor) -> ReadOnly:
        return ReadOnly(array)

    # ---- recurrent layers -----------------------------------------------------------------------

    def pack_mixer(self, weights: MixerWeights | Mamba2Weights) -> DeviceMixer:
        return self._device_mixer(weights)

    def _device_mixer(self, weights: MixerWeights | Mamba2Weights | KdaWeights) -> DeviceMixer:
        mixer = device_mixer(weights, self.device, self._scratch)
        self.takes_device_forms &= mixer.family.prefill is not None
        return mixer

    def mix(
        self,
        projected: torch.Tensor,
        weights: DeviceMixer,
        batch: RaggedStates | DeviceRows,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        return self._mix((projected,), weights, batch, conv_state, state)

    def mix_trees(
        self,
        projected: torch.Tensor,
        weights: DeviceMixer,
        trees: RaggedTrees | DeviceRoots | DeviceTrees,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        spec: SpecLayer,
        out: torch.Tensor,
    ) -> None:
        self._mix_trees((projected,), weights, trees, conv_state, state, spec, out)

    def pack_kda(self, weights: KdaWeights) -> DeviceMixer:
        return self._device_mixer(weights)

    def mix_kda(
        self,
        projected: torch.Tensor,
        forget: torch.Tensor,
        gate: torch.Tensor,
        weights: DeviceMixer,
        batch: RaggedStates | DeviceRows,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        return self._mix((projected, forget, gate), weights, batch, conv_state, state)

    def mix_kda_trees(
        self,
        projected: torch.Tensor,
        forget: torch.Tensor,
        gate: torch.Tensor,
        weights: DeviceMixer,
        trees: RaggedTrees | DeviceRoots | DeviceTrees,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        spec: SpecLayer,
        out: torch.Tensor,
    ) -> None:
        inputs = (projected, forget, gate)
        self._mix_trees(inputs, weights, trees, conv_state, state, spec, out)

    def _mix(
        self,
        inputs: Inputs,
        mixer: DeviceMixer,
        batch: RaggedStates | DeviceRows,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        rows, pools = self._batches.rows(batch), (conv_state, state)
        if rows.prefill is not None and mixer.family.prefill is None and rows.host is not None:
            return mixer.mix_by_reference(inputs, rows.host, pools).to(self.dtype)
        out = inputs[0].new_empty(inputs[0].shape[0], state.shape[1] * state.shape[3])
        if rows.prefill is not None:
            with _Taken(inputs, rows.prefill_tokens, out) as (taken, into):
                mixer.prefill(taken, rows.prefill, pools, into)
        if rows.singles is not None:
            with _Taken(inputs, rows.single_tokens, out) as (taken, into):
                mixer.step(taken, rows.singles, pools, into)
        if rows.saves is not None:
            sources, targets = rows.saves
            for pool in pools:
                pool.index_copy_(0, targets, pool.index_select(0, sources))
        return out

    def _mix_trees(
        self,
        inputs: Inputs,
        mixer: DeviceMixer,
        trees: RaggedTrees | DeviceRoots | DeviceTrees,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        spec: SpecLayer,
        out: torch.Tensor,
    ) -> None:
        pools = (conv_state, state)
        if isinstance(trees, RaggedTrees):
            has_kernel = mixer.family.trees is not None or trees.trees.are_roots
            if spec.mode != "log" or not has_kernel:
                mixer.trees_by_reference(inputs, trees, pools, spec, out)
                return
        found = self._batches.trees(trees)
        if isinstance(found, DeviceRoots):
            there = slice(found.first_token, found.first_token + found.slots.shape[0])
            taken = tuple(x[there] for x in inputs)
            mixer.log_step(taken, found, pools, spec, out[there])
        else:
            taken = tuple(x[found.first :] for x in inputs)
            mixer.trees(taken, found.trees, pools, spec, out[found.first :])

    def copy_nodes(self, arrays: StateArrays, moves: Moves | DeviceMoves) -> None:
        copy_nodes_(arrays, self._moves(moves))

    def replay(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        keeping.replay(rule, arrays, moves)

    def fold(self, rule: Rule, arrays: StateArrays, moves: Moves | DeviceMoves) -> None:
        del rule  # the rows say it all
        fold_(arrays, self._moves(moves))

    def _moves(self, moves: Moves | DeviceMoves) -> DeviceMoves:
        return moves if isinstance(moves, DeviceMoves) else DeviceMoves.of(moves, self.device)

    def move_rows(
        self, array: torch.Tensor, rows: Int32Array, sources: Int32Array, targets: Int32Array
    ) -> None:
        """At once: no row is a target before it is a source, where sources ascend."""
        row, source, target = (
            upload(x.astype(np.int64), self.device) for x in (rows, sources, targets)
        )
        array[:, row, target] = array[:, row, source]

    # ---- attention ------------------------------------------------------------------------------

    def pack_attention(self, weights: AttentionWeights) -> AttentionWeights:
        sizes = (weights.num_heads, weights.head_dim)
        self._scratch.declare(AttendScratch, *sizes, by_row=True, least=LEAST_PARTS)
        if self._angles is None or self._angles[0] is not weights.angles:
            self._angles = weights.angles, weights.angles.to(self.device)
        return moved(replace(weights, angles=self._angles[1]), self.device)

    def attention(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: Queries,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(k_pool, ReadOnly) or isinstance(v_pool, ReadOnly):
            raise ValueError("this memory is read-only: no K and V are written to it")
        heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
        forms = self._batches.tokens(batch, heads, kv_heads, dim)
        q = projected.new_empty(projected.shape[0], heads, dim)
        write_kv(projected, weights, forms.positions, forms.write_slots, q, k_pool, v_pool)
        gate = projected[:, (heads + 2 * kv_heads) * dim :] if weights.has_gate else None
        return self._attend(q, gate, forms, k_pool, v_pool)

    def attend_frozen(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: Queries,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(batch, RaggedQueries):
            check_short(batch)
        k, v = (x.elem if isinstance(x, ReadOnly) else x for x in (k, v))
        heads, dim = weights.num_heads, weights.head_dim
        forms = self._batches.tokens(batch, heads, weights.num_kv_heads, dim)
        q = projected.new_empty(projected.shape[0], heads, dim)
        write_kv(projected, weights, forms.positions, forms.write_slots, q, None, None)
        return self._attend(q, projected[:, heads * dim :], forms, k, v)

    def _attend(
        self,
        q: torch.Tensor,
        gate: torch.Tensor | None,
        forms: TokenForms,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        heads, dim = q.shape[1], v.shape[2]
        out = q.new_empty(q.shape[0], heads * dim)
        for part in forms.parts:
            there = part.tokens
            num_parts = max((there.stop - there.start) * part.config.splits, LEAST_PARTS)
            if part.config.splits == 1:
                num_parts = 1
            attention_kernels.attend(
                q[there], part.queries, k, v, q.shape[2] ** -0.5, part.config,
                self._scratch.get(AttendScratch, num_parts, heads, dim), out[there],
                gate=None if gate is None else gate[there],
            )  # fmt: skip
        return out

    def pack_latent_attention(self, weights: LatentWeights) -> LatentWeights:
        self.takes_device_forms = False
        return moved(weights, self.device)

    def latent_attention(
        self, projected: torch.Tensor, weights: LatentWeights, batch: Any, pool: torch.Tensor
    ) -> torch.Tensor:
        out = latent_reference.latent_attention(projected.float(), weights, batch, pool)
        return out.to(self.dtype)

    # ---- mixtures of experts --------------------------------------------------------------------

    def pack_routing(self, routing: Routing) -> Routing:
        return moved(routing, self.device)

    def route(self, logits: torch.Tensor, routing: Routing) -> Routes:
        return moe_reference.route(logits, routing)

    def pack_experts(self, weights: ExpertWeights) -> ExpertWeights:
        self.takes_device_forms = False
        return moved(weights, self.device)

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        return moe_reference.experts(x.float(), routes, weights, residual).to(self.dtype)


class _Taken:
    """Some tokens' inputs, and where their outputs go: in place for a run, else put back."""

    def __init__(self, inputs: Inputs, tokens: Tokens, out: torch.Tensor) -> None:
        self._tokens = tokens
        self._out = out
        self._inputs = tuple(x[tokens] for x in inputs)
        self._into = out[tokens] if isinstance(tokens, slice) else torch.empty(0)
        if isinstance(tokens, torch.Tensor):
            self._into = out.new_empty(tokens.shape[0], out.shape[1])

    def __enter__(self) -> tuple[Inputs, torch.Tensor]:
        return self._inputs, self._into

    def __exit__(self, *_: object) -> None:
        if isinstance(self._tokens, torch.Tensor):
            self._out.index_copy_(0, self._tokens, self._into)


def _move_slots(registry: Registry, device: torch.device, sources: Any, targets: Any) -> None:
    if not isinstance(sources, torch.Tensor):
        sources, targets = upload(sources, device), upload(targets, device)
    move_slots_(registry, sources, targets)

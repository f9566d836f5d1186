"""The torch backend: the references, as they are. Read next: ``compiled_ops.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.activation.reference import Activation, activate
from hyradix.kernels.attention import reference as attention_reference
from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.gated_delta_net import reference as mixer_reference
from hyradix.kernels.gated_delta_net import tree_reference
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda import reference as kda_reference
from hyradix.kernels.kda import tree_reference as kda_trees
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.linear.packed import PackedLinear
from hyradix.kernels.mamba2 import reference as mamba2_reference
from hyradix.kernels.mamba2 import tree_reference as mamba2_trees
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.memory import ReadOnly, moved
from hyradix.kernels.mla import reference as latent_reference
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.moe import reference as moe_reference
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.ops import SlotMover
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.state_slots.reference import move_slots_
from hyradix.kernels.tree_recurrence import keeping
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

Norm = tuple[torch.Tensor, float]
Mixer = MixerWeights | Mamba2Weights


class TorchOps:
    """See ``ops.Ops``."""

    name = "torch"
    dtype = torch.float32
    appends_roots = False
    takes_device_forms = False

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  # constant
        self.device = device

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def reserve(self, max_tokens: int, max_rows: int) -> int:
        return 0

    def slot_mover(self, tensors: Sequence[torch.Tensor]) -> SlotMover:
        return partial(move_slots_, tensors)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        return array

    def read_only(self, array: torch.Tensor) -> ReadOnly:
        return ReadOnly(array)

    def pack_embedding(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device)

    def embed(self, weight: torch.Tensor, token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        return weight.index_select(0, torch.from_numpy(token_ids).to(self.device)).float()

    def select(self, x: torch.Tensor, index: npt.NDArray[np.int32]) -> torch.Tensor:
        return x.index_select(0, torch.from_numpy(index).to(self.device))

    def pack_linear(self, weight: torch.Tensor) -> PackedLinear:
        return PackedLinear(weight.to(self.device))

    def pack_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return weight.to(self.device), eps

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, *norm)

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedLinear) -> torch.Tensor:
        return weight.multiply(rms_norm(x, *norm))

    def norm_linear_activate(
        self, x: torch.Tensor, norm: Norm, weight: PackedLinear, activation: Activation
    ) -> torch.Tensor:
        return activate(self.norm_linear(x, norm, weight), activation)

    def logits(
        self,
        x: torch.Tensor,
        norm: Norm,
        weight: PackedLinear,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = self.norm_linear(x, norm, weight)
        return found if out is None else out.copy_(found)

    def linear_add(
        self, x: torch.Tensor, weight: PackedLinear, residual: torch.Tensor
    ) -> torch.Tensor:
        return weight.multiply(x, residual)

    def linear(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        return weight.multiply(x)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activate(x, activation)

    def pack_routing(self, routing: Routing) -> Routing:
        return moved(routing, self.device)

    def route(self, logits: torch.Tensor, routing: Routing) -> Routes:
        return moe_reference.route(logits, routing)

    def pack_experts(self, weights: ExpertWeights) -> ExpertWeights:
        return moved(weights, self.device)

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        return moe_reference.experts(x, routes, weights, residual)

    def pack_mixer(self, weights: Mixer) -> Mixer:
        return moved(weights, self.device)

    def mix(
        self,
        projected: torch.Tensor,
        weights: Mixer,
        batch: RaggedStates,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(weights, Mamba2Weights):
            return mamba2_reference.mix(projected, weights, batch, conv_state, state)
        return mixer_reference.mix(projected, weights, batch, conv_state, state)

    def mix_trees(
        self,
        projected: torch.Tensor,
        weights: Mixer,
        trees: RaggedTrees,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        spec: SpecLayer,
        out: torch.Tensor,
    ) -> None:
        if isinstance(weights, Mamba2Weights):
            mamba2_trees.mix_trees(projected, weights, trees, conv_state, state, spec, out)
        else:
            tree_reference.mix_trees(projected, weights, trees, conv_state, state, spec, out)

    def copy_nodes(self, arrays: StateArrays, moves: Moves) -> None:
        keeping.copy_nodes(arrays, moves)

    def replay(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        keeping.replay(rule, arrays, moves)

    def fold(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        keeping.fold(rule, arrays, moves)

    def move_rows(
        self,
        array: torch.Tensor,
        rows: npt.NDArray[np.int32],
        sources: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
    ) -> None:
        keeping.move_rows(array, rows, sources, targets)

    def pack_kda(self, weights: KdaWeights) -> KdaWeights:
        return moved(weights, self.device)

    def mix_kda(
        self,
        projected: torch.Tensor,
        forget: torch.Tensor,
        gate: torch.Tensor,
        weights: KdaWeights,
        batch: RaggedStates,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        return kda_reference.mix(projected, forget, gate, weights, batch, conv_state, state)

    def mix_kda_trees(
        self,
        projected: torch.Tensor,
        forget: torch.Tensor,
        gate: torch.Tensor,
        weights: KdaWeights,
        trees: RaggedTrees,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        spec: SpecLayer,
        out: torch.Tensor,
    ) -> None:
        kda_trees.mix_trees(projected, forget, gate, weights, trees, conv_state, state, spec, out)

    def pack_attention(self, weights: AttentionWeights) -> AttentionWeights:
        return moved(weights, self.device)

    def attention(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: RaggedQueries,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor:
        return attention_reference.attention(projected, weights, batch, k_pool, v_pool, wanted)

    def attend_frozen(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: RaggedQueries,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return attention_reference.attend_frozen(projected, weights, batch, k, v)

    def pack_latent_attention(self, weights: LatentWeights) -> LatentWeights:
        return moved(weights, self.device)

    def latent_attention(
        self,
        projected: torch.Tensor,
        weights: LatentWeights,
        batch: RaggedQueries,
        pool: torch.Tensor,
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor:
        return latent_reference.latent_attention(projected, weights, batch, pool, wanted)

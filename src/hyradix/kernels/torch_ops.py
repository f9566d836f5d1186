"""The torch backend: the references, as they are. Read next: ``compiled_ops.py``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention import reference as attention_reference
from hyradix.kernels.attention.reference import AttentionWeights, RaggedQueries
from hyradix.kernels.gated_delta_net import reference as mixer_reference
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.linear.packed import PackedLinear
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.swiglu.reference import swiglu

Norm = tuple[torch.Tensor, float]


class TorchOps:
    """See ``ops.Ops``."""

    name = "torch"

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        return array

    def embed(self, weight: torch.Tensor, token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        return weight.index_select(0, torch.from_numpy(token_ids)).float()

    def select(self, x: torch.Tensor, index: npt.NDArray[np.int32]) -> torch.Tensor:
        return x.index_select(0, torch.from_numpy(index))

    def pack_linear(self, weight: torch.Tensor) -> PackedLinear:
        return PackedLinear(weight)

    def pack_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return weight, eps

    def norm_linear(self, x: torch.Tensor, norm: Norm, weight: PackedLinear) -> torch.Tensor:
        return weight.multiply(rms_norm(x, *norm))

    def linear_add(
        self, x: torch.Tensor, weight: PackedLinear, residual: torch.Tensor
    ) -> torch.Tensor:
        return weight.multiply(x, residual)

    def swiglu_linear_add(
        self, gate_up: torch.Tensor, weight: PackedLinear, residual: torch.Tensor
    ) -> torch.Tensor:
        return weight.multiply(swiglu(gate_up), residual)

    def pack_mixer(self, weights: MixerWeights) -> MixerWeights:
        return weights

    def mix(
        self,
        projected: torch.Tensor,
        weights: MixerWeights,
        batch: RaggedStates,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        return mixer_reference.mix(projected, weights, batch, conv_state, state)

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
        return attention_reference.attention(projected, weights, batch, k_pool, v_pool)

"""The torch backend: the references, as they are. Read next: ``compiled_ops.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyradix.kernels.attention import reference as attention_reference
from hyradix.kernels.attention.reference import AttentionWeights, RaggedQueries
from hyradix.kernels.gated_delta_net import reference as mixer_reference
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.linear.packed import PackedLinear
from hyradix.kernels.rms_norm import reference as norm_reference
from hyradix.kernels.swiglu import reference as swiglu_reference


class TorchOps:
    """See ``ops.Ops``."""

    name = "torch"

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def pack_linear(self, weight: torch.Tensor) -> PackedLinear:
        return PackedLinear(weight)

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return weight.multiply(x, residual)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm_reference.rms_norm(x, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu_reference.swiglu(gate_up)

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

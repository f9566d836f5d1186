"""The operations that layers call, and the choice between their torch and compiled forms.

Owns: the ``Ops`` interface and ``load_ops``. Does not know: layers, models.
Invariant: both backends take and return torch tensors of the same shapes and agree within float32
rounding. Packing happens once, at load.
Read next: ``torch_ops.py``, ``compiled_ops.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hyradix.errors import ConfigError
from hyradix.kernels.attention.reference import AttentionWeights, RaggedQueries
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates

BACKENDS = ("auto", "compiled", "torch")


class Ops(Protocol):
    """Float32 activations in and out; ``pack_*`` make what the others take (opaque)."""

    name: str

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of torch, and of the compiled kernels where there are any."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call ``run`` (any forward) so often that every kernel it reaches has been compiled."""

    def pack_linear(self, weight: torch.Tensor) -> Any:
        """A weight ``[O, I]``, float32 or bfloat16, in the form that ``linear`` takes."""

    def linear(
        self, x: torch.Tensor, weight: Any, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[T, I]`` -> ``[T, O]``, plus ``residual``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``[T, C]`` -> ``[T, C]``."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[T, 2I]`` -> ``[T, I]``."""

    def pack_mixer(self, weights: MixerWeights) -> Any:
        """What ``mix`` takes."""

    def mix(
        self,
        projected: torch.Tensor,
        weights: Any,
        batch: RaggedStates,
        conv_state: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """See ``gated_delta_net.reference.mix``."""

    def pack_attention(self, weights: AttentionWeights) -> Any:
        """What ``attention`` takes."""

    def attention(
        self,
        projected: torch.Tensor,
        weights: Any,
        batch: RaggedQueries,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        """See ``attention.reference.attention``."""


def load_ops(backend: str = "auto") -> Ops:
    """The operations of a backend. Raises ``ConfigError`` if it is unknown or cannot be had."""
    if backend not in BACKENDS:
        raise ConfigError(f"kernel backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "torch":
        # numba is an optional backend: this is the one place that loads it
        try:
            module = importlib.import_module("hyradix.kernels.compiled_ops")
        except ImportError as error:
            if backend == "compiled":
                raise ConfigError(f"the compiled kernels need numba: {error}") from error
        else:
            ops: Ops = module.CompiledOps()
            return ops
    torch_ops: Ops = importlib.import_module("hyradix.kernels.torch_ops").TorchOps()
    return torch_ops

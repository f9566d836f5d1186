"""The operations that layers call, and the choice between their torch and compiled forms.

Owns: the ``Ops`` interface and ``load_ops``. Does not know: layers, models.

Invariants:
- Activations are arrays of the backend's own kind (``Array``), of type ``dtype``, on ``device``:
  torch tensors, or numpy arrays where the kernels are compiled by numba. ``dtype`` is float32 on
  the CPU; Triton's is the weights'. Only ``embed`` and ``tensor`` cross over.
- Backends agree within the rounding of ``dtype``. Packing happens once, at load.
- Batches are the host's ragged forms; Triton takes those of ``device_forms.py`` as well.
Read next: ``torch_ops.py``, ``compiled_ops.py``, ``triton_ops.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hyradix.errors import ConfigError
from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

BACKENDS = ("auto", "compiled", "torch", "triton")
Array = Any
"""An array of the backend's own kind; slicing its first dimension works on all kinds."""
Int32Array = npt.NDArray[np.int32]
SlotMover = Callable[[Any, Any], None]


class Ops(Protocol):
    """What ``pack_*`` return is opaque: it is what the others take."""

    name: str
    device: torch.device
    dtype: torch.dtype
    """Of activations, KV, windows and raw columns. States, u and gates are float32 everywhere."""
    appends_roots: bool
    """Whether trees that are all roots append their rows to the log themselves: in a step of such
    trees, ``mix_trees`` leaves what they log behind the valid log rows, not at the nodes' rows."""
    takes_device_forms: bool
    """Whether a forward over ``device_forms`` runs, without waiting for the device."""

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of torch, and of the compiled kernels where there are any."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call ``run`` (any forward) so often that every kernel it reaches has been compiled."""

    def reserve(self, max_tokens: int, max_rows: int) -> int:
        """Allocate what the kernels need between them for steps of so many tokens, of which so many
        rows decode; returns the bytes. For the models that were packed before."""

    def slot_mover(self, tensors: Sequence[torch.Tensor]) -> SlotMover:
        """What moves whole slots (dimension 1) of all of ``tensors``, which stay where they are:
        ``move(sources, targets)``, see ``state_slots.reference.move_slots_``; ``int32[J]`` of the
        host, or (Triton) of the device."""

    def view(self, tensor: torch.Tensor) -> Array:
        """The same memory as an ``Array``."""

    def tensor(self, array: Array) -> torch.Tensor:
        """The same memory as a tensor."""

    def read_only(self, array: Array) -> Array:
        """The same memory, lent: whatever would write through the result raises."""

    def pack_embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` ``[V, C]`` where ``embed`` reads it; ``pack_linear`` shares its memory."""

    def embed(self, weight: torch.Tensor, token_ids: Int32Array) -> Array:
        """Rows of ``weight`` ``[V, C]`` by ``token_ids`` ``[T]``: ``[T, C]``."""

    def select(self, x: Array, index: Int32Array) -> Array:
        """Rows of ``[T, C]`` by index ``[M]``."""

    def pack_linear(self, weight: torch.Tensor) -> Any:
        """A weight ``[O, I]``, float32 or bfloat16, in the form that the products take."""

    def pack_norm(self, weight: torch.Tensor, eps: float) -> Any:
        """A norm's weight ``[C]``; where it is zero-centred, 1 is added already."""

    def norm(self, x: Array, norm: Any) -> Array:
        """rms_norm(x ``[T, C]``)."""

    def norm_linear(self, x: Array, norm: Any, weight: Any) -> Array:
        """rms_norm(x ``[T, I]``) times weight -> ``[T, O]``."""

    def norm_linear_activate(
        self, x: Array, norm: Any, weight: Any, activation: Activation
    ) -> Array:
        """``activate`` of ``norm_linear``."""

    def logits(
        self, x: Array, norm: Any, weight: Any, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``norm_linear`` as a float32 tensor; out: ``[T, O]``, contiguous, that is to be it."""

    def linear_add(self, x: Array, weight: Any, residual: Array) -> Array:
        """x ``[T, I]`` times weight, plus residual ``[T, O]``; its memory may be the result's."""

    def linear(self, x: Array, weight: Any) -> Array:
        """x ``[T, I]`` times weight -> ``[T, O]``."""

    def activate(self, x: Array, activation: Activation) -> Array:
        """See ``activation.reference.activate``."""

    def pack_routing(self, routing: Routing) -> Any:
        """What ``route`` takes."""

    def route(self, logits: Array, routing: Any) -> Routes:
        """See ``moe.reference.route``."""

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """What ``experts`` takes."""

    def experts(self, x: Array, routes: Routes, weights: Any, residual: Array | None) -> Array:
        """See ``moe.reference.experts``."""

    def pack_mixer(self, weights: MixerWeights | Mamba2Weights) -> Any:
        """What ``mix`` takes; it says which family's mixer that is."""

    def mix(
        self, projected: Array, weights: Any, batch: RaggedStates, conv_state: Array, state: Array
    ) -> Array:
        """See ``gated_delta_net.reference.mix`` and ``mamba2.reference.mix``.

        Rows of tokens in no sequence stay unwritten.
        """

    def mix_trees(
        self,
        projected: Array,
        weights: Any,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        """The rows of ``out`` (of ``mix``) that are nodes; the state pool is only read.

        See ``gated_delta_net.tree_reference.mix_trees`` and Mamba2's.
        """

    def copy_nodes(self, arrays: StateArrays, moves: Moves) -> None:
        """Node states and their windows to state slots: ``tree_recurrence.keeping.copy_nodes``."""

    def replay(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        """Held inputs into state slots: ``tree_recurrence.keeping.replay``."""

    def fold(self, rule: Rule, arrays: StateArrays, moves: Moves) -> None:
        """Log rows into state slots: ``tree_recurrence.keeping.fold``."""

    def move_rows(
        self,
        array: Array,
        rows: Int32Array,
        sources: Int32Array,
        targets: Int32Array,
    ) -> None:
        """Rows of a draft buffer, in order: ``tree_recurrence.keeping.move_rows``."""

    def pack_kda(self, weights: KdaWeights) -> Any:
        """What ``mix_kda`` takes."""

    def mix_kda(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        weights: Any,
        batch: RaggedStates,
        conv_state: Array,
        state: Array,
    ) -> Array:
        """See ``kda.reference.mix``; rows of tokens in no sequence stay unwritten."""

    def mix_kda_trees(
        self,
        projected: Array,
        forget: Array,
        gate: Array,
        weights: Any,
        trees: RaggedTrees,
        conv_state: Array,
        state: Array,
        spec: SpecLayer,
        out: Array,
    ) -> None:
        """See ``kda.tree_reference.mix_trees``."""

    def pack_attention(self, weights: AttentionWeights) -> Any:
        """What ``attention`` takes."""

    def attention(
        self,
        projected: Array,
        weights: Any,
        batch: RaggedQueries,
        k_pool: Array,
        v_pool: Array,
        wanted: WantedTokens | None = None,
    ) -> Array:
        """See ``attention.reference.attention``. Raises ``ValueError`` if a pool is read-only."""

    def attend_frozen(
        self, projected: Array, weights: Any, batch: RaggedQueries, k: Array, v: Array
    ) -> Array:
        """See ``attention.reference.attend_frozen``; weights as ``attention`` takes them."""

    def pack_latent_attention(self, weights: LatentWeights) -> Any:
        """What ``latent_attention`` takes."""

    def latent_attention(
        self,
        projected: Array,
        weights: Any,
        batch: RaggedQueries,
        pool: Array,
        wanted: WantedTokens | None = None,
    ) -> Array:
        """See ``mla.reference.latent_attention``."""


def load_ops(
    backend: str = "auto",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Ops:
    """The operations of a backend. Raises ``ConfigError`` if it is unknown or cannot be had.

    dtype: of the weights; activations have it too where the kernels are Triton's.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"kernel backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    device = torch.device(device)
    is_cpu = device.type == "cpu"
    # optional backends: this is the one place that loads them
    if backend == "triton" or (backend == "auto" and not is_cpu):
        return _load_triton(device, dtype)
    if backend == "compiled" and not is_cpu:
        raise ConfigError(f"the compiled kernels are the CPU's, not for device {device}")
    if backend != "torch":
        try:
            module = importlib.import_module("hyradix.kernels.compiled_ops")
        except ImportError as error:
            if backend == "compiled":
                raise ConfigError(f"the compiled kernels need numba: {error}") from error
        else:
            ops: Ops = module.CompiledOps()
            return ops
    torch_ops: Ops = importlib.import_module("hyradix.kernels.torch_ops").TorchOps(device)
    return torch_ops


LEAST_TRITON = (3, 4)


def _load_triton(device: torch.device, dtype: torch.dtype) -> Ops:
    """Raises ``ConfigError`` saying what is missing."""
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        raise ConfigError(f"the kernels for device {device} need Triton: {error}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        raise ConfigError(f"Triton {least} or newer is needed, not {version}")
    if device.type == "cuda":
        _check_cuda(device)
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("Triton runs on the CPU only with TRITON_INTERPRET=1 (slow: for tests)")
    ops: Ops = importlib.import_module("hyradix.kernels.triton_ops").TritonOps(device, dtype)
    return ops


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device, or this torch was built without CUDA")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(
            f"the kernels need a GPU of compute capability 8.0 or newer, not {major}.{minor}"
        )

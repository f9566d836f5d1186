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
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.device_forms import DeviceRoots, DeviceRows
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.memory import ReadOnly, upload
from hyradix.kernels.ops import SlotMover
from hyradix.kernels.state_slots.triton import Registry, move_slots_
from hyradix.kernels.tree_recurrence import keeping
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_keeping import DeviceMoves, copy_nodes_, fold_
from hyradix.kernels.tree_recurrence.triton_verify import DeviceTrees
from hyradix.kernels.triton_attention import AttentionOps
from hyradix.kernels.triton_batches import Tokens
from hyradix.kernels.triton_families import DeviceMixer, Inputs, device_mixer

Int32Array = npt.NDArray[np.int32]


class TritonOps(AttentionOps):
    """See ``ops.Ops``."""

    name = "triton"
    appends_roots = True
    takes_device_forms = True

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

    def pack_mixer(self, weights: MixerWeights | Mamba2Weights) -> DeviceMixer:
        return device_mixer(weights, self.device, self._scratch)

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
        return device_mixer(weights, self.device, self._scratch)

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
        if spec.mode != "log":
            assert isinstance(trees, RaggedTrees), f"mode {spec.mode} takes the host's trees"
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

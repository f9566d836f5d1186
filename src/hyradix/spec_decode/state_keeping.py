"""Three ways to keep recurrent state while drafts are judged, behind one interface.

Owns: ``StateKeeper`` and the choice by mode. Does not know: tokens, acceptance, KV.

Order of a round: ``begin``, draft, ``arrange``, the forward (``Ops.mix_trees`` with ``layers``),
judge, ``keep``. Invariants:
- Between ``begin`` and ``keep`` the state pool is only read.
- A slot that is written holds the state, the convolution window and (``mtp``) the last hidden state
  h_{d-1} of exactly one depth d, or zeros where nobody followed the row.
- What is not committed is never folded away (``log``): dropping it stays possible.
Read next: ``snapshot_keeping.py``, ``replay_keeping.py``, ``log_keeping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hyradix.kernels.ops import Array, Ops
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.request import Int32Array, StateFold, StateSave
from hyradix.spec_decode.draft_buffers import DraftBuffers, StatePoolTensors
from hyradix.spec_decode.log_keeping import LogKeeper
from hyradix.spec_decode.replay_keeping import ReplayKeeper
from hyradix.spec_decode.snapshot_keeping import SnapshotKeeper
from hyradix.state_bytes import RecurrentShape, SpecShape, SpecStateMode


class StateKeeper(Protocol):
    """``rows``, ``slots``, ``starts``: ``int32[M]`` request rows, their working states' slots, and
    the depths that they have consumed."""

    @property
    def layers(self) -> tuple[SpecLayer, ...]:
        """What each recurrent layer's ``mix_trees`` takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the draft buffers, as allocated."""

    def enter(self, row: int) -> None:
        """A request enters ``row``: whatever was pending there is void."""

    def begin(
        self, rows: Int32Array, slots: Int32Array, starts: Int32Array, committed: Int32Array
    ) -> None:
        """Before drafting. ``replay``: what is held goes into the working states. ``log``: rows up
        to ``committed`` ``int32[M]`` are folded where another round would not fit."""

    def arrange(
        self,
        trees: FlatTrees,
        first_token: Int32Array,
        rows: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
    ) -> RaggedTrees:
        """What recurrent layers need; ``first_token`` ``int32[M]``: rows of ``projected`` at which
        the trees begin. Raises ``ValueError`` for a tree where only chains were planned."""

    def keep(
        self,
        trees: RaggedTrees,
        starts: Int32Array,
        paths: Sequence[Int32Array],
        saves: Sequence[StateSave],
        hidden: Array | None,
    ) -> None:
        """Consume ``paths[i]`` of tree i, nodes from the root on (none: nothing changes).

        saves: each whose depth the path reaches is written, exactly there; others are not. Saves
        of rows without a tree are passed over. hidden: ``[total nodes, hidden_size]``, the
        target's last hidden states, where the pool has them.
        """

    def fold(self, folds: Sequence[StateFold]) -> None:
        """Bring each row's state exactly to its depth; what is pending past it is dropped."""


def make_keeper(
    mode: SpecStateMode,
    ops: Ops,
    rule: Rule,
    shape: RecurrentShape,
    spec: SpecShape,
    recurrent: torch.Tensor,
    conv: torch.Tensor,
    hidden: torch.Tensor | None,
) -> StateKeeper:
    """The keeper of a mode for a state pool (see ``StatePoolTensors``)."""
    pool = StatePoolTensors(recurrent, conv, hidden)
    buffers = DraftBuffers(mode, ops, shape, spec, pool)
    if mode == "snapshot":
        return SnapshotKeeper(ops, buffers, pool)
    if mode == "replay":
        return ReplayKeeper(ops, rule, buffers, spec.num_requests)
    return LogKeeper(ops, rule, buffers, spec)

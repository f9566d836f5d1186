"""What is kept of judged drafts, over all layers at once, in torch: copies, replays, folds, moves.

Owns: how a state slot becomes the state after some of a request's nodes, held inputs or log rows.
Does not know: requests, acceptance, which of them are committed.

Invariants:
- A movement reads its source slot's state and window and writes its target slot's; both may be one.
  Where a slot is a source of several movements, the one in place goes in a call of its own, last.
- ``replay`` ends in the bits of decode; a fold's sums of g are float64, its products full float32.
Read next: ``layer_reference.py``, ``sequential.py``, ``state_log.py``; ``keeping_compiled.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.tree_recurrence.layer_reference import columns_at
from hyradix.kernels.tree_recurrence.rules import Rows, Rule, update
from hyradix.kernels.tree_recurrence.state_log import folded

Int32Array = npt.NDArray[np.int32]
Array = Any


@dataclass(frozen=True, slots=True)
class StateArrays:
    """The state pool and the draft buffers of all layers.

    recurrent: ``[L, slots, Hv, K, V]``. windows: ``[L, slots, K-1, C]``. The others as in
    ``SpecLayer`` with a leading L; ``states`` as ``copy_nodes`` takes it (mode ``snapshot``).
    """

    recurrent: Array
    windows: Array
    conv: Array
    states: Array = None
    k: Array = None
    v: Array = None
    u: Array = None
    g: Array = None
    beta: Array = None


@dataclass(frozen=True, slots=True)
class Moves:
    """J movements, all ``int32[J]``: from state slot ``sources`` and buffer row ``rows`` to state
    slot ``targets`` (all different).

    counts: tokens (log rows, held inputs) that are taken from the start; of ``copy_nodes`` the
    node. taps: ``int32[J, K-1]`` columns of the target's window, as ``RaggedTrees.taps``.
    """

    sources: Int32Array
    targets: Int32Array
    rows: Int32Array
    counts: Int32Array
    taps: Int32Array

    def __len__(self) -> int:
        return len(self.rows)


def copy_nodes(arrays: StateArrays, moves: Moves) -> None:
    """The state of node ``counts[j]``, whole, to the target."""
    for source, target, row, node, taps in _each(moves, arrays):
        arrays.recurrent[:, target] = arrays.states[:, row, node]
        _move_window(arrays, source, target, row, taps)


def replay(rule: Rule, arrays: StateArrays, moves: Moves) -> None:
    """The source's state, then ``counts[j]`` held inputs one after the other, to the target."""
    for source, target, row, count, taps in _each(moves, arrays):
        for layer, pool in enumerate(arrays.recurrent):
            state = pool[source]
            held = (arrays.k, arrays.v, arrays.g, arrays.beta)
            for token in range(count):
                k, v, g, beta = (x[layer, row, token] for x in held)
                _, state = update(rule, state, k, v, g, beta)
            pool[target] = state
        _move_window(arrays, source, target, row, taps)


def fold(rule: Rule, arrays: StateArrays, moves: Moves) -> None:
    """The closed formula over the first ``counts[j]`` log rows on the source's state."""
    del rule  # the rows say it all: one number per head or one per channel
    for source, target, row, count, taps in _each(moves, arrays):
        for layer, pool in enumerate(arrays.recurrent):
            logged = (arrays.k, arrays.u, arrays.g)
            log = Rows(*(x[layer, row : row + 1, :count] for x in logged))
            counts = torch.tensor([count], device=pool.device)
            pool[target] = folded(pool[source].unsqueeze(0), log, counts)[0]
        _move_window(arrays, source, target, row, taps)


def move_rows(
    array: torch.Tensor, rows: Int32Array, sources: Int32Array, targets: Int32Array
) -> None:
    """array[:, rows[j], targets[j]] = array[:, rows[j], sources[j]], one j after the other.

    array: ``[L, N+1, M, ...]``; the numbers ``int32[J]``.
    """
    for row, source, target in zip(rows.tolist(), sources.tolist(), targets.tolist(), strict=True):
        array[:, row, target] = array[:, row, source]


def _each(moves: Moves, arrays: StateArrays) -> Any:
    numbers = (moves.sources, moves.targets, moves.rows, moves.counts)
    taps = torch.from_numpy(moves.taps).to(arrays.windows.device, torch.long)
    return zip(*(x.tolist() for x in numbers), taps, strict=True)


def _move_window(
    arrays: StateArrays, source: int, target: int, row: int, taps: torch.Tensor
) -> None:
    for windows, columns in zip(arrays.windows, arrays.conv, strict=True):
        windows[target] = columns_at(windows[source], columns[row], taps)

"""Draft trees in the compiled backend: which kernel runs, and with which arrays.

Owns: the choice between one thread and all, by elements of work; what stands in for buffers that a
mode lacks. Does not know: layers, requests.
Read next: ``gated_delta_net/tree_compiled.py``, ``tree_recurrence/keeping_compiled.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hyradix.kernels.gated_delta_net import tree_compiled as mixer_kernels
from hyradix.kernels.tree_recurrence import keeping_compiled as kernels
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer

Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
_NO_TOKENS = np.zeros((0, 0, 0, 0), np.float32)
_NO_RATES = np.zeros((0, 0, 0), np.float32)


def mix_trees(
    projected: Array,
    weights: tuple[Any, ...],
    trees: RaggedTrees,
    conv_state: Array,
    state: Array,
    spec: SpecLayer,
    out: Array,
    parallel_from: float,
) -> None:
    """See ``gated_delta_net.tree_reference.mix_trees``; weights as ``pack_mixer`` makes them."""
    heads, conv, *vectors = weights
    flat = arrays_of(trees)
    is_large = len(trees.trees.parents) * state[0].size > parallel_from
    if spec.mode == "log":
        solve = mixer_kernels.solve_parallel if is_large else mixer_kernels.solve_serial
        columns = (spec.first_node, spec.num_base_columns, spec.num_log_rows)
        solve(projected, flat, heads, conv, *vectors, conv_state, state, columns, spec.conv,
              spec.k, spec.u, spec.g, out)  # fmt: skip
        return
    held = (_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_RATES)
    if spec.mode == "replay":
        held = (spec.k, spec.v, spec.g, spec.beta)
    walk = mixer_kernels.walk_parallel if is_large else mixer_kernels.walk_serial
    walk(projected, flat, heads, conv, *vectors, conv_state, state,
         (spec.first_node, spec.num_base_columns), spec.conv, spec.states, *held, out)  # fmt: skip


def arrays_of(trees: RaggedTrees) -> tuple[Int32Array, ...]:
    """The one order in which tree kernels take a step's trees."""
    flat = trees.trees
    return (
        flat.cu_nodes, flat.parents, flat.path_offsets, flat.path_nodes, trees.first_token,
        trees.slots, trees.rows, trees.num_log_rows, trees.taps,
    )  # fmt: skip


def copy_nodes(arrays: StateArrays, moves: Moves, parallel_from: float) -> None:
    """See ``keeping.copy_nodes``."""
    is_large = len(moves) * arrays.recurrent[:, 0].size > parallel_from
    copy = kernels.copy_parallel if is_large else kernels.copy_serial
    copy(
        arrays.recurrent, arrays.windows, arrays.conv, arrays.states, moves.sources,
        moves.targets, moves.rows, moves.counts, moves.taps,
    )  # fmt: skip


def replay(rule: Rule, arrays: StateArrays, moves: Moves, parallel_from: float) -> None:
    """See ``keeping.replay``."""
    is_large = int(moves.counts.sum()) * arrays.recurrent[:, 0].size > parallel_from
    run = kernels.replay_parallel if is_large else kernels.replay_serial
    run(
        arrays.recurrent, arrays.windows, arrays.conv, arrays.k, arrays.v, arrays.g, arrays.beta,
        moves.sources, moves.targets, moves.rows, moves.counts, moves.taps, rule.has_delta,
    )  # fmt: skip


def fold(arrays: StateArrays, moves: Moves, parallel_from: float) -> None:
    """See ``keeping.fold``."""
    is_large = int(moves.counts.sum()) * arrays.recurrent[:, 0].size > parallel_from
    run = kernels.fold_parallel if is_large else kernels.fold_serial
    run(
        arrays.recurrent, arrays.windows, arrays.conv, arrays.k, arrays.u, arrays.g,
        moves.sources, moves.targets, moves.rows, moves.counts, moves.taps,
    )  # fmt: skip


def move_rows(array: Array, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
    """See ``keeping.move_rows``."""
    num_layers, num_requests, num_rows = array.shape[:3]
    base = rows * np.int32(num_rows)
    flat = array.reshape(num_layers, num_requests * num_rows, -1)
    kernels.move_rows(flat, base + sources, base + targets)

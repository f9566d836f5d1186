"""A recurrent layer over trees in torch: what all families share around their own gates.

Owns: what a family's mixer has to be (``MixerTokens``); raw columns into the draft buffers and
windows out of them; the recurrence over the nodes in the three modes.
Does not know: projections, gates, norms (a family's ``reference.py``).

Invariants:
- ``snapshot`` and ``replay``: every node is computed alone, from its parent's state, by the very
  operations of a decode step, so it has the bits of plain decode on its path.
- State pool and windows are read only.
Read next: ``masked.py`` (mode ``log``), ``../gated_delta_net/reference.py`` (a family).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from hyradix.kernels.tree_recurrence import masked
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import Inputs, Rows, Rule, read, update
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.topology import describe


class MixerTokens(Protocol):
    """The tokens of a step in one layer, and what its family does before and after the recurrence.

    projected: ``[T, C or more]``, raw columns first.
    """

    @property
    def projected(self) -> torch.Tensor: ...

    def prepare(
        self, tokens: slice, window: torch.Tensor
    ) -> tuple[torch.Tensor, Inputs, torch.Tensor]:
        """q ``[n, Hk, K]``, inputs (no leading N), all raw columns ``[K-1+n, C]``.

        tokens: n that follow ``window`` ``[K-1, C]``.
        """

    def finish(self, o: torch.Tensor, inputs: Inputs, tokens: slice) -> torch.Tensor:
        """o ``[n, Hv, V]`` -> ``[n, Hv V]``; inputs: as ``prepare`` gave them."""


def mix_trees(
    rule: Rule,
    layer: MixerTokens,
    trees: RaggedTrees,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    spec: SpecLayer,
    out: torch.Tensor,
) -> None:
    """Fill the rows of ``out`` that are nodes of ``trees``.

    Effects: ``spec`` as its mode says; ``conv_state`` and ``state`` are not written.
    """
    for tree in range(trees.trees.num_trees):
        _, tokens = nodes_of(trees, tree)
        raw = layer.projected[tokens, : conv_state.shape[2]]
        if not raw.shape[0]:
            continue
        windows = node_windows(raw, trees, tree, conv_state, spec)
        each = [slice(i, i + 1) for i in range(tokens.start, tokens.stop)]
        parts = [layer.prepare(one, windows[i]) for i, one in enumerate(each)]
        q, inputs = torch.cat([part[0] for part in parts]), [part[1] for part in parts]
        joined = Inputs(
            *(torch.cat([getattr(x, name) for x in inputs]) for name in ("k", "v", "g", "beta"))
        )
        o = verify_nodes(rule, q, joined, trees, tree, state, spec)
        for i, one in enumerate(each):
            out[one] = layer.finish(o[i : i + 1], inputs[i], one)


def as_tensors(spec: SpecLayer) -> SpecLayer:
    """The same buffers, numpy's as tensors that share their memory."""
    arrays = {field.name: getattr(spec, field.name) for field in fields(spec)}
    shared: dict[str, Any] = {
        name: torch.from_numpy(array)
        for name, array in arrays.items()
        if isinstance(array, np.ndarray)
    }
    return replace(spec, **shared)


def nodes_of(trees: RaggedTrees, tree: int) -> tuple[slice, slice]:
    """Where the nodes of a tree stand: among all nodes, and among the tokens of the step."""
    first, last = (int(x) for x in trees.trees.cu_nodes[tree : tree + 2])
    token = int(trees.first_token[tree])
    return slice(first, last), slice(token, token + last - first)


def node_windows(
    raw: torch.Tensor, trees: RaggedTrees, tree: int, conv_state: torch.Tensor, spec: SpecLayer
) -> torch.Tensor:
    """The window ``[K-1, C]`` before each node ``[n, K-1, C]``; raw ``[n, C]`` are their columns.

    Effects: the columns are written to the tree's row of ``spec.conv``.
    """
    base, row = conv_state[int(trees.slots[tree])], spec.conv[int(trees.rows[tree])]
    if spec.num_base_columns:
        row[: spec.num_base_columns] = base[base.shape[0] - spec.num_base_columns :]
    row[spec.first_node : spec.first_node + raw.shape[0]] = raw
    nodes, _ = nodes_of(trees, tree)
    taps = torch.from_numpy(trees.taps[nodes, :-1]).to(raw.device, torch.long)
    return columns_at(base, row, taps)


def columns_at(base: torch.Tensor, row: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Columns ``[..., C]`` by ``taps`` ``int64[...]``: of a row, or (negative) of the base."""
    of_row, of_base = row[taps.clamp(min=0)], base[(-1 - taps).clamp(min=0)]
    return torch.where((taps >= 0).unsqueeze(-1), of_row, of_base)


def verify_nodes(
    rule: Rule,
    q: torch.Tensor,
    inputs: Inputs,
    trees: RaggedTrees,
    tree: int,
    state: torch.Tensor,
    spec: SpecLayer,
) -> torch.Tensor:
    """o ``[n, Hv, V]`` of every node of a tree.

    Args: q ``[n, Hk, K]``; inputs: n nodes, no leading N; state ``[slots, Hv, K, V]``, not written.
    Effects: fills what the mode keeps of these nodes in ``spec``.
    """
    base, row = state[int(trees.slots[tree])], int(trees.rows[tree])
    nodes, _ = nodes_of(trees, tree)
    parents = trees.trees.parents[nodes].tolist()
    if spec.mode == "log":
        return _verify_by_log(
            rule, q, inputs, parents, base, row, int(trees.num_log_rows[tree]), spec
        )
    if spec.mode == "replay":
        for target, source in (
            (spec.k, inputs.k), (spec.v, inputs.v), (spec.g, inputs.g), (spec.beta, inputs.beta)
        ):  # fmt: skip
            target[row, : len(parents)] = source
    outputs = []
    for node, parent in enumerate(parents):
        before = spec.states[row, parent] if parent >= 0 else base
        k, v, g, beta = (x[node] for x in (inputs.k, inputs.v, inputs.g, inputs.beta))
        _, after = update(rule, before, k, v, g, beta)
        spec.states[row, node] = after
        outputs.append(read(after, q[node]))
    return torch.stack(outputs)


def _verify_by_log(
    rule: Rule,
    q: torch.Tensor,
    inputs: Inputs,
    parents: list[int],
    base: torch.Tensor,
    row: int,
    num_rows: int,
    spec: SpecLayer,
) -> torch.Tensor:
    log = Rows(*(x[row : row + 1, :num_rows] for x in (spec.k, spec.u, spec.g)))
    o, rows = masked.verify(
        rule,
        base.unsqueeze(0),
        log,
        torch.tensor([num_rows], device=q.device),
        q.unsqueeze(0),
        Inputs(*(x.unsqueeze(0) for x in (inputs.k, inputs.v, inputs.g, inputs.beta))),
        describe(torch.tensor([parents], device=q.device)),
    )
    own = slice(spec.num_log_rows, spec.num_log_rows + len(parents))
    for target, source in ((spec.k, rows.k), (spec.u, rows.u), (spec.g, rows.g)):
        target[row, own] = source[0]
    return o[0]

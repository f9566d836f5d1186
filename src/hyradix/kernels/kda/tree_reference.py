"""The mixer of Kimi delta attention over draft trees, in torch.

Owns: which parts of the mixer are its own (convolution, gates, norm) and which are every family's.
Invariants: those of ``../tree_recurrence/layer_reference.py``.
Read next: ``reference.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.kda.reference import KdaWeights, finish, prepare
from hyradix.kernels.tree_recurrence.layer_reference import node_windows, nodes_of, verify_nodes
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import KDA, Inputs
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer


def mix_trees(
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
    """Fill the rows of ``out`` that are nodes of ``trees``; shapes as in ``reference.mix``.

    Effects: ``spec`` as its mode says; ``conv_state`` and ``state`` are not written.
    """
    for tree in range(trees.trees.num_trees):
        _, tokens = nodes_of(trees, tree)
        if tokens.start == tokens.stop:
            continue
        raw = projected[tokens, : conv_state.shape[2]]
        windows = node_windows(raw, trees, tree, conv_state, spec)
        each = [slice(i, i + 1) for i in range(tokens.start, tokens.stop)]
        parts = [
            prepare(projected[one], forget[one], weights, window, state.shape[1:])
            for one, window in zip(each, windows, strict=True)
        ]
        q = torch.cat([part[0] for part in parts])
        inputs = [part[1] for part in parts]
        joined = Inputs(
            *(torch.cat([getattr(x, name) for x in inputs]) for name in ("k", "v", "g", "beta"))
        )
        o = verify_nodes(KDA, q, joined, trees, tree, state, spec)
        for i, one in enumerate(each):
            out[one] = finish(o[i : i + 1], gate[one], weights)

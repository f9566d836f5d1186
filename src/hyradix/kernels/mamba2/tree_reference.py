"""The mixer of Mamba2 over draft trees, in torch.

Owns: which parts of the mixer are its own (convolution, time steps, skip, norm) and which are every
family's. Invariants: those of ``../tree_recurrence/layer_reference.py``.
Read next: ``reference.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.mamba2.reference import Mamba2Weights, finish, prepare
from hyradix.kernels.tree_recurrence.layer_reference import node_windows, nodes_of, verify_nodes
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import MAMBA2, Inputs
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer


def mix_trees(
    projected: torch.Tensor,
    weights: Mamba2Weights,
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
        nodes = projected[tokens]
        if not nodes.shape[0]:
            continue
        windows = node_windows(nodes[:, : conv_state.shape[2]], trees, tree, conv_state, spec)
        parts = [
            prepare(nodes[i : i + 1], weights, windows[i], state.shape[1:])
            for i in range(len(windows))
        ]
        q = torch.cat([part[0] for part in parts])
        inputs = [part[1] for part in parts]
        joined = Inputs(
            *(torch.cat([getattr(x, name) for x in inputs]) for name in ("k", "v", "g", "beta"))
        )
        o = verify_nodes(MAMBA2, q, joined, trees, tree, state, spec)
        for i, token in enumerate(range(tokens.start, tokens.stop)):
            one = slice(i, i + 1)
            out[token] = finish(o[one], joined.v[one], nodes[one], weights)[0]

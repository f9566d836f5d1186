"""The mixer of Mamba2 over draft trees, in torch.

Owns: nothing but the call: the parts are those of ``reference.py``, the rest is every family's.
Invariants: those of ``../tree_recurrence/layer_reference.py``.
Read next: ``reference.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.mamba2.reference import Mamba2Tokens, Mamba2Weights
from hyradix.kernels.tree_recurrence import layer_reference
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import MAMBA2
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
    layer = Mamba2Tokens(projected, weights, state.shape[1:])
    layer_reference.mix_trees(MAMBA2, layer, trees, conv_state, state, spec, out)

"""The mixer of a gated delta net over draft trees, in torch.

Owns: nothing but the call: the parts are those of ``reference.py``, the rest is every family's.
Invariants: those of ``../tree_recurrence/layer_reference.py``.
Read next: ``reference.py``, ``tree_compiled.py`` (the fast twin).
"""

from __future__ import annotations

import torch

from hyradix.kernels.gated_delta_net.reference import GdnTokens, MixerWeights
from hyradix.kernels.tree_recurrence import layer_reference
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer


def mix_trees(
    projected: torch.Tensor,
    weights: MixerWeights,
    trees: RaggedTrees,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    spec: SpecLayer,
    out: torch.Tensor,
) -> None:
    """Fill the rows of ``out`` that are nodes of ``trees``; shapes as in ``reference.mix``.

    Effects: ``spec`` as its mode says; ``conv_state`` and ``state`` are not written.
    """
    layer = GdnTokens(projected, weights, state.shape[1:])
    layer_reference.mix_trees(GDN, layer, trees, conv_state, state, spec, out)

"""What one forward needs besides activations: where its tokens stand and which memory is theirs.

Owns: ``ForwardContext``. Does not know: who chose the slots, how the pools are made.
Read next: ``gated_delta_net.py``, ``attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.ops import Array
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Views of the pools by layer.

    k, v: one ``[num_kv_slots + 1, Hkv, D]`` per attention layer; no v where KV is latent. conv
    ``[num_states + 1, K-1, C]`` and recurrent ``[num_states + 1, Hv, dk, dv]``: one per recurrent
    layer. All as ``Ops.view`` makes them.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    conv: tuple[Array, ...]
    recurrent: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's tokens, row by row, and the memory they work on."""

    states: RaggedStates
    queries: RaggedQueries
    memory: LayerMemory
    trees: RaggedTrees | None = None
    """The tokens behind those of ``states``: nodes of draft trees, which leave states alone."""
    spec: tuple[SpecLayer, ...] = ()
    """What nodes leave behind, by recurrent layer."""

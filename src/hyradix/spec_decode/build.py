"""From the name of a proposer to one that runs. Owns: which memory each of them is lent.

Read next: ``proposer.py``.
"""

from __future__ import annotations

from hyradix.errors import ConfigError
from hyradix.layers.context import LayerMemory
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array
from hyradix.spec_config import ProposerName
from hyradix.spec_decode.frozen_kv_mtp import FrozenKvMtpProposer
from hyradix.spec_decode.mtp import MtpProposer
from hyradix.spec_decode.ngram import NgramProposer
from hyradix.spec_decode.proposer import Proposer


def build_proposer(
    name: ProposerName,
    model: Decoder,
    token_ids: Int32Array,
    kv_slots: Int32Array,
    memory: LayerMemory,
) -> Proposer:
    """A proposer for the rows of one request table.

    Args:
        model: loaded with ``proposer=name``.
        token_ids, kv_slots: ``int32[max_requests, width]``, the runner's tables: read whenever
            the proposer is asked, never written.
        memory: with ``mtp``, k and v have one layer more than the model.

    Raises: ``ConfigError`` if the model was loaded without that head, or has no attention layer.
    """
    if name == "ngram":
        return NgramProposer(token_ids)
    head, num_layers = model.draft_head, model.config.num_attention_layers
    if head is None or head.name != name:
        raise ConfigError(f"the model was loaded without the draft head {name}", param="spec")
    if name == "mtp":
        assert len(memory.k) == num_layers + 1, "the KV pool has no draft layer"
        k, v = memory.k[num_layers], memory.v[num_layers]
        return MtpProposer(head, token_ids, kv_slots, k, v)
    if num_layers == 0:
        raise ConfigError(f"{name} reads an attention layer, and the model has none", param="spec")
    k, v = (model.ops.read_only(pool[num_layers - 1]) for pool in (memory.k, memory.v))
    return FrozenKvMtpProposer(head, token_ids, kv_slots, k, v)

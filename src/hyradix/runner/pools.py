"""The KV pool and the state pool: the memory behind slot numbers.

Owns: the tensors, their exact byte counts, and every mover of whole state slots.
Does not know: who owns a slot (the cache does), layers' arithmetic.

Invariants:
- Slot 0 is a sink in both pools.
- A state slot is a SET of tensors; every mover walks ``StatePool.tensors``, so none is forgotten.
- Allocated bytes equal ``EngineConfig.kv_pool_bytes`` and ``.state_pool_bytes``; memory that no
  slot was ever written in is not touched, so it costs no resident bytes.
Read next: ``runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hyradix.config import EngineConfig
from hyradix.kernels.ops import Ops
from hyradix.layers.context import LayerMemory
from hyradix.models.config import ModelConfig
from hyradix.request import StateOp, StateOpKind


class KVPool:
    """k, v: ``float32[L_a, num_kv_slots + 1, Hkv, D]``; with ``mtp`` its layer is the last.

    Models with latent KV keep one row per token, in ``k``, and have no layers of ``v``.
    """

    def __init__(self, model: ModelConfig, num_slots: int, num_draft_layers: int = 0) -> None:
        num_layers = model.num_attention_layers + num_draft_layers
        shape = (num_layers, num_slots + 1, model.num_kv_heads, model.head_dim)
        self.k = torch.empty(shape)
        self.v = torch.empty(0 if model.has_latent_kv else num_layers, *shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, the sink included."""
        return self.k.nbytes + self.v.nbytes

    def poison(self, slots: Iterable[int]) -> None:
        """Fill slots with NaN (tests: whoever reads freed memory shows it)."""
        index = torch.tensor(list(slots), dtype=torch.long)
        for tensor in (self.k, self.v):
            tensor.index_fill_(1, index, float("nan"))


class StatePool:
    """recurrent: ``float32[L_r, num_states + 1, Hv, dk, dv]``; conv: ``[.., K-1, C]``.

    hidden: ``[1, num_states + 1, hidden]``, the target's hidden state of the last token consumed,
    after the final norm; None where no draft head needs it.
    """

    def __init__(self, model: ModelConfig, num_slots: int, *, has_hidden: bool = False) -> None:
        lead = (model.num_recurrent_layers, num_slots + 1)
        self.recurrent = torch.empty(*lead, model.num_v_heads, model.k_dim, model.v_dim)
        self.conv = torch.empty(*lead, model.conv_width - 1, model.conv_channels)
        self.hidden: torch.Tensor | None = None
        self.tensors: tuple[torch.Tensor, ...] = (self.recurrent, self.conv)
        """All that makes up a state; dimension 1 is the slot."""
        if has_hidden:
            self.hidden = torch.empty(1, num_slots + 1, model.hidden_size)
            self.tensors += (self.hidden,)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, the sink included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def apply(self, ops: Sequence[StateOp]) -> None:
        """Do one step's clears and copies. No slot is both a source and a destination."""
        for op in ops:
            for tensor in self.tensors:
                target = tensor[:, op.destination]
                if op.kind == StateOpKind.CLEAR:
                    target.zero_()
                else:
                    target.copy_(tensor[:, op.source])

    def poison(self, slots: Iterable[int]) -> None:
        """Fill slots with NaN (tests)."""
        index = torch.tensor(list(slots), dtype=torch.long)
        for tensor in self.tensors:
            tensor.index_fill_(1, index, float("nan"))


class Pools:
    """Both pools of one engine, and the views by layer that a forward works on."""

    def __init__(self, model: ModelConfig, config: EngineConfig, ops: Ops) -> None:
        proposer = config.spec.proposer if config.spec is not None else "ngram"
        self.kv = KVPool(model, config.num_kv_slots, int(proposer == "mtp"))
        self.states = StatePool(model, config.num_states, has_hidden=proposer != "ngram")
        assert self.kv.num_bytes == config.kv_pool_bytes, "KV bytes were computed wrongly"
        assert self.states.num_bytes == config.state_pool_bytes, "state bytes were computed wrongly"
        self.memory = LayerMemory(
            k=tuple(map(ops.view, self.kv.k)),
            v=tuple(map(ops.view, self.kv.v)),
            conv=tuple(map(ops.view, self.states.conv)),
            recurrent=tuple(map(ops.view, self.states.recurrent)),
        )

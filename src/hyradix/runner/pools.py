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

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.ops import Ops
from hyradix.layers.context import LayerMemory
from hyradix.models.config import ModelConfig
from hyradix.request import SINK, StateOp, StateOpKind


class KVPool:
    """k, v: ``[L_a, num_kv_slots + 1, Hkv, D]``; with ``mtp`` its layer is the last.

    Models with latent KV keep one row per token, in ``k``, and have no layers of ``v``.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_slots: int,
        num_draft_layers: int = 0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num_layers = model.num_attention_layers + num_draft_layers
        shape = (num_layers, num_slots + 1, model.num_kv_heads, model.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        of_values = (0 if model.has_latent_kv else num_layers, *shape[1:])
        self.v = torch.empty(of_values, device=device, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, the sink included."""
        return self.k.nbytes + self.v.nbytes

    def poison(self, slots: Iterable[int]) -> None:
        """Fill slots with NaN (tests: whoever reads freed memory shows it)."""
        index = torch.tensor(list(slots), dtype=torch.long, device=self.k.device)
        for tensor in (self.k, self.v):
            tensor.index_fill_(1, index, float("nan"))


class StatePool:
    """recurrent: ``float32[L_r, num_states + 1, Hv, dk, dv]``; conv: ``[.., K-1, C]``.

    hidden: ``[1, num_states + 1, hidden]``, the target's hidden state of the last token consumed,
    after the final norm; None where no draft head needs it. dtype: of conv and hidden.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_slots: int,
        *,
        has_hidden: bool = False,
        ops: Ops | None = None,
    ) -> None:
        """ops: whose device and type the memory has, and who moves it; None: to be looked at."""
        lead = (model.num_recurrent_layers, num_slots + 1)
        device, dtype = (None, torch.float32) if ops is None else (ops.device, ops.dtype)
        heads = (model.num_v_heads, model.k_dim, model.v_dim)
        window = (model.conv_width - 1, model.conv_channels)
        self.recurrent = torch.empty(*lead, *heads, device=device)
        self.conv = torch.empty(*lead, *window, device=device, dtype=dtype)
        self.hidden: torch.Tensor | None = None
        self.tensors: tuple[torch.Tensor, ...] = (self.recurrent, self.conv)
        """All that makes up a state; dimension 1 is the slot."""
        if has_hidden:
            size = (1, num_slots + 1, model.hidden_size)
            self.hidden = torch.empty(size, device=device, dtype=dtype)
            self.tensors += (self.hidden,)
        self._move = ops.slot_mover(self.tensors) if ops is not None else None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, the sink included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def apply(self, ops: Sequence[StateOp]) -> None:
        """Do one step's clears and copies. No slot is both a source and a destination."""
        if not ops:
            return
        assert self._move is not None, "this pool is only looked at"
        is_clear = [op.kind == StateOpKind.CLEAR for op in ops]
        sources = [-1 if clear else op.source for op, clear in zip(ops, is_clear, strict=True)]
        targets = [op.destination for op in ops]
        self._move(np.array(sources, np.int32), np.array(targets, np.int32))

    def clear_sink(self) -> None:
        """Zeros in slot 0: rehearsals read it."""
        for tensor in self.tensors:
            tensor[:, SINK].zero_()

    def poison(self, slots: Iterable[int]) -> None:
        """Fill slots with NaN (tests)."""
        index = torch.tensor(list(slots), dtype=torch.long, device=self.conv.device)
        for tensor in self.tensors:
            tensor.index_fill_(1, index, float("nan"))


class Pools:
    """Both pools of one engine, and the views by layer that a forward works on."""

    def __init__(self, model: ModelConfig, config: EngineConfig, ops: Ops) -> None:
        proposer = config.spec.proposer if config.spec is not None else "ngram"
        num_draft_layers = int(proposer == "mtp")
        self.kv = KVPool(
            model, config.num_kv_slots, num_draft_layers, device=ops.device, dtype=ops.dtype
        )
        has_hidden = proposer != "ngram"
        self.states = StatePool(model, config.num_states, has_hidden=has_hidden, ops=ops)
        assert self.kv.num_bytes == config.kv_pool_bytes, "KV bytes were computed wrongly"
        assert self.states.num_bytes == config.state_pool_bytes, "state bytes were computed wrongly"
        self.memory = LayerMemory(
            k=tuple(map(ops.view, self.kv.k)),
            v=tuple(map(ops.view, self.kv.v)),
            conv=tuple(map(ops.view, self.states.conv)),
            recurrent=tuple(map(ops.view, self.states.recurrent)),
        )

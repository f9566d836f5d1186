"""What a step's rows are on a GPU: the forms that ``TritonOps`` takes in place of the ragged ones.

Owns: ``DeviceStates`` (prefill), ``DeviceSingles`` and ``DeviceRoots`` (decode), ``DeviceTokens``
of ``Part``s and ``DeviceWanted`` (attention). Draft trees:
``tree_recurrence/triton_verify.DeviceTrees``. Does not know: who makes them, host tables, layers.

Invariants:
- Index tensors are int32 on the device and of padded size: nothing here depends on values that the
  host would have to wait for, so a form over static memory serves every replay of a CUDA graph.
- Tokens of prefill rows stand first, then one token for each row that decodes.
- Slot 0 is padding: such a row writes nothing, and its output is zeros.
Read next: ``gated_delta_net/reference.py`` (``RaggedStates``), ``attention/triton.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hyradix.kernels.attention.triton import DeviceQueries
from hyradix.kernels.attention.triton_gather import DeviceKeys
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.gated_delta_rule.triton import Chunks, chunk_table
from hyradix.kernels.memory import upload
from hyradix.kernels.triton_table import AttendConfig


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """``RaggedStates`` of rows that prefill, ``sequences`` ``int32[T]`` of tokens, the chunks."""

    cu_seqlens: torch.Tensor
    sequences: torch.Tensor
    save_offsets: torch.Tensor
    save_at: torch.Tensor
    save_slots: torch.Tensor
    chunks: Chunks

    @classmethod
    def of(cls, batch: RaggedStates, device: torch.device) -> DeviceStates:
        """Copies; once a step, all layers share them. Sequences without tokens are left out."""
        counts = np.diff(batch.cu_seqlens)
        assert counts.min() > 0, "a sequence without tokens"
        sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        table, offsets = chunk_table(
            batch.cu_seqlens, batch.save_offsets, batch.save_at, batch.save_slots
        )

        def on_device(x: np.ndarray) -> torch.Tensor:
            return upload(x, device)

        return cls(
            cu_seqlens=on_device(batch.cu_seqlens),
            sequences=on_device(sequences),
            save_offsets=on_device(batch.save_offsets),
            save_at=on_device(batch.save_at),
            save_slots=on_device(batch.save_slots),
            chunks=Chunks(on_device(table), on_device(offsets), on_device(batch.slots)),
        )


@dataclass(frozen=True, slots=True)
class DeviceSingles:
    """N rows that decode in place, one token each: row n has token ``first_token`` + n.

    slots: ``int32[N]`` working states.
    """

    first_token: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """``ForwardContext.states``: what changes working states in this step; either may be None."""

    prefill: DeviceStates | None
    singles: DeviceSingles | None


@dataclass(frozen=True, slots=True)
class DeviceRoots:
    """``ForwardContext.trees`` where each tree is its root: N rows that decode through the log.

    Row n has token ``first_token`` + n. slots: ``int32[N]`` bases, only read. rows: ``int32[N]`` of
    the draft buffers. num_log_rows: ``int32[N]`` valid rows before this token; all layers append
    row number num_log_rows[n], and the count is the caller's to move on.
    """

    first_token: int
    slots: torch.Tensor
    rows: torch.Tensor
    num_log_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens that attend in one launch.

    tokens: where they stand in the step; ``queries`` counts them from 0, and its blocks were made
    for ``config``. keys: those that are copied to one place first.
    """

    tokens: slice
    queries: DeviceQueries
    config: AttendConfig
    keys: DeviceKeys | None = None


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """``ForwardContext.queries``: all T tokens, prefill, decodes and nodes alike.

    positions, write_slots: ``int32[T]``. parts: every token is in one of them.
    """

    positions: torch.Tensor
    write_slots: torch.Tensor
    parts: tuple[Part, ...]

    @classmethod
    def whole(
        cls,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        queries: DeviceQueries,
        config: AttendConfig,
    ) -> DeviceTokens:
        """All tokens in one part."""
        part = Part(slice(0, positions.shape[0]), queries, config)
        return cls(positions, write_slots, (part,))


@dataclass(frozen=True, slots=True)
class DeviceWanted:
    """``WantedTokens``: index ``int32[M]``; parts: of the M tokens, counted from 0."""

    index: torch.Tensor
    parts: tuple[Part, ...]

"""The forward of a step on a device, over padded columns or over all tokens of a mixed step.

Owns: the contexts that the model runs on, where logits and greedy tokens of a decode step lie.
Does not know: batches, the host, sampling beyond the argmax.

Invariants:
- ``decode(size)`` reads static memory only, so it can be captured; a mixed step runs the same model
  over what was sent for it.
- Rows that decode attend by themselves, in a mixed step too: their long keys are split over
  programs, which those of a large chunk are not.
- The configuration of attention follows from sizes, never from values.
Read next: ``device_runner.py``, ``kernels/device_forms.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.argmax.triton import best_of
from hyradix.kernels.attention.triton import DeviceQueries, num_programs, tokens_per_block
from hyradix.kernels.attention.triton_gather import DeviceKeys, gathers
from hyradix.kernels.device_forms import (
    DeviceRoots,
    DeviceRows,
    DeviceSingles,
    DeviceStates,
    DeviceTokens,
    DeviceWanted,
    Part,
)
from hyradix.kernels.gated_delta_rule.triton import Chunks
from hyradix.kernels.triton_table import AttendConfig, attend_config
from hyradix.layers.context import ForwardContext, LayerMemory
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array
from hyradix.runner.decode_form import DecodeColumns
from hyradix.runner.device_batch import Planner, StepPlan
from hyradix.runner.device_log import DeviceLog
from hyradix.runner.device_tables import DeviceTables

OnDevice = Mapping[str, torch.Tensor]


class DeviceForward:
    """logits: ``float32[max_rows, V]``, found: ``int32[2, max_rows]`` of the last decode step.

    group: query heads of a KV head.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        tables: DeviceTables,
        memory: LayerMemory,
        log: DeviceLog | None,
        columns: Sequence[DecodeColumns],
    ) -> None:
        """columns: of decode steps, by size, in static memory."""
        device, max_rows = model.ops.device, config.max_requests
        self._model = model
        self._tables = tables
        self._memory = memory
        self._log = log
        self._offsets = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(self._offsets)
        self._blocks = torch.stack([self._offsets, zeros], 1)
        self._columns = columns
        self.group = model.config.num_heads // model.config.num_kv_heads
        self.logits = torch.zeros(max_rows, model.config.vocab_size, device=device)
        self.found = torch.zeros(2, max_rows, dtype=torch.int32, device=device)

    def attend_config(self, counts: Int32Array, *, is_gathered: bool = False) -> AttendConfig:
        """Of rows with so many tokens that attend in one launch."""
        config = self._model.config
        return attend_config(
            self._model.ops.device,
            rows=int(counts.max()) * self.group,
            programs=num_programs(counts, self.group, config.num_kv_heads),
            dim=config.head_dim,
            itemsize=self._model.ops.dtype.itemsize,
            is_gathered=is_gathered,
        )

    # ---- steps of decodes -----------------------------------------------------------------------

    def decode(self, size: int) -> None:
        """Fill ``logits`` and ``found``, and put the greedy tokens into the token table."""
        columns = self._columns[size]
        logits = self._model.logits(self._hidden(columns, size), out=self.logits[:size])
        found = self.found[:, :size]
        best_of(logits, found)
        self._tables.tokens.scatter_(0, columns.next_at, found[0])

    def _hidden(self, columns: DecodeColumns, size: int) -> torch.Tensor:
        part = self._decode_part(columns, size, 0)
        tokens = DeviceTokens(columns.positions, columns.write_slots, (part,))
        token_ids = self._tables.tokens.index_select(0, columns.token_at)
        return self._run(token_ids, tokens, None, columns, 0, None)

    def _decode_part(self, columns: DecodeColumns, size: int, first: int) -> Part:
        """Of ``size`` rows, whose tokens stand from ``first`` on."""
        return self._singles(columns.rows, columns.starts, size, first)

    def _singles(self, rows: torch.Tensor, positions: torch.Tensor, size: int, first: int) -> Part:
        """``size`` tokens from ``first`` on, each of another row."""
        queries = DeviceQueries(
            self._offsets[: size + 1],
            rows,
            positions,
            self._blocks[:size],
            self._tables.kv_slots,
        )
        return Part(
            slice(first, first + size), queries, self.attend_config(np.ones(size, np.int32))
        )

    # ---- steps with prefill ---------------------------------------------------------------------

    def lay_out(self, plan: StepPlan, planner: Planner) -> None:
        """What ``mixed`` needs goes into ``plan.arrays``."""
        planner.lay_out(plan)
        if plan.num_prefill:
            gathers_keys = self.gathers_keys(plan.prefill_counts, plan.num_prefill_keys)
            config = self.attend_config(plan.prefill_counts, is_gathered=gathers_keys)
            tokens = tokens_per_block(config, self.group)
            planner.lay_out_prefill(plan, tokens, gathers_keys=gathers_keys)

    def gathers_keys(self, counts: Int32Array, num_keys: Int32Array) -> bool:
        """Whether rows of so many tokens that see so many keys have those copied first."""
        config, itemsize = self._model.config, self._model.ops.dtype.itemsize
        return config.latent is None and gathers(
            counts, num_keys, self.group, dim=config.head_dim, itemsize=itemsize
        )

    def padded(self, sent: OnDevice, config: AttendConfig) -> torch.Tensor:
        """Hidden states ``[M, hidden]`` of the rows that are sampled from, where all prefill.

        sent: as ``mixed``, of padded sizes, blocks of queries made for ``config``.
        """
        tokens = DeviceTokens(
            sent["positions"], sent["write_slots"], (self._prefill_part(sent, config),)
        )
        token_ids = self._tables.tokens.index_select(0, sent["token_at"])
        states = _states(sent, num_usual=1)
        return self._run(token_ids, tokens, states, None, len(token_ids), self._wanted(sent))

    def mixed(
        self,
        plan: StepPlan,
        sent: OnDevice,
        columns: DecodeColumns,
        *,
        wants_all: bool,
    ) -> torch.Tensor:
        """Hidden states of the M tokens that are sampled from, or of all, ``[T, hidden]``.

        columns: of exactly the rows that decode.
        """
        first, parts = plan.num_prefill_tokens, []
        if plan.num_prefill:
            is_gathered = "key_blocks" in sent
            config = self.attend_config(plan.prefill_counts, is_gathered=is_gathered)
            parts.append(self._prefill_part(sent, config))
        if plan.num_decodes:
            parts.append(self._decode_part(columns, plan.num_decodes, first))
        tokens = DeviceTokens(sent["positions"], sent["write_slots"], tuple(parts))
        token_ids = self._tables.tokens.index_select(0, sent["token_at"])
        states = _states(sent) if plan.num_prefill else None
        decodes = columns if plan.num_decodes else None
        wanted = None if wants_all else self._wanted(sent)
        return self._run(token_ids, tokens, states, decodes, first, wanted)

    def _wanted(self, sent: OnDevice) -> DeviceWanted:
        """The last tokens of rows that are sampled from: they attend as decodes do."""
        index, size = sent["last"], len(sent["last"])
        if not size:
            return DeviceWanted(index, ())
        part = self._singles(sent["last_rows"], sent["last_positions"], size, 0)
        return DeviceWanted(index, (part,))

    def _prefill_part(self, sent: OnDevice, config: AttendConfig) -> Part:
        queries = DeviceQueries(
            sent["seq_cu"],
            sent["seq_rows"],
            sent["seq_starts"],
            sent["seq_blocks"],
            self._tables.kv_slots,
        )
        keys = None
        if "key_blocks" in sent:
            keys = DeviceKeys(sent["key_blocks"], sent["key_offsets"])
        return Part(slice(0, len(sent["seq_of"])), queries, config, keys)

    def _run(
        self,
        token_ids: torch.Tensor,
        tokens: DeviceTokens,
        prefill: DeviceStates | None,
        decodes: DecodeColumns | None,
        first: int,
        wanted: DeviceWanted | None,
    ) -> torch.Tensor:
        singles, roots = None, None
        if decodes is not None and self._log is None:
            singles = DeviceSingles(first, decodes.slots)
        elif decodes is not None:
            roots = DeviceRoots(first, decodes.slots, decodes.log_rows, decodes.num_log_rows)
        context = ForwardContext(
            DeviceRows(prefill, singles),  # type: ignore[arg-type]  # Triton's forms
            tokens,  # type: ignore[arg-type]
            self._memory,
            roots,  # type: ignore[arg-type]
            () if self._log is None else self._log.layers,
        )
        hidden: torch.Tensor = self._model.forward(
            token_ids,  # type: ignore[arg-type]
            context,
            wanted,  # type: ignore[arg-type]
        )
        return hidden


def _states(sent: OnDevice, num_usual: int = 0) -> DeviceStates:
    chunks = Chunks(sent["seq_chunks"], sent["seq_chunk_offsets"], sent["seq_slots"], num_usual)
    return DeviceStates(
        cu_seqlens=sent["seq_cu"],
        sequences=sent["seq_of"],
        save_offsets=sent["seq_save_offsets"],
        save_at=sent["seq_save_at"],
        save_slots=sent["seq_save_slots"],
        chunks=chunks,
    )

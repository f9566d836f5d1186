"""Steps of little prefill, padded to a size, so that they can be captured: what a cached prompt is.

A few hundred new tokens behind a cached prefix keep a device busy for less time than a host takes
to launch their kernels one by one; replayed, they cost the host one call.

Owns: which rows run this way, their numbers in static memory, their logits and greedy tokens.
Does not know: rows that decode (a graph of their own, in the same step), sampling beyond argmax.

Invariants:
- ``_run(size)`` reads static memory only, so it can be captured.
- What a row is given does not depend on the way it ran, beyond rounding (``mixed`` is the twin).
Read next: ``prefill_form.py``, ``device_forward.py``, ``device_launch.py`` (the caller).
"""

from __future__ import annotations

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.device_bytes import PREFILL_ROWS, gathered_keys, prefill_ladder
from hyradix.kernels.argmax.triton import best_of
from hyradix.kernels.attention.triton import tokens_per_block
from hyradix.kernels.triton_table import AttendConfig
from hyradix.models.decoder import Decoder
from hyradix.runner.device_batch import Planner, StepPlan
from hyradix.runner.device_forward import DeviceForward
from hyradix.runner.device_tables import DeviceTables
from hyradix.runner.graphs import Graphs
from hyradix.runner.prefill_form import PrefillForm, PrefillSize
from hyradix.runner.staging import Staging

RowResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of M rows that are sampled from: logits ``float32[M, V]``, found ``int32[2, M]`` (greedy tokens
and faults), next_at ``int64[M]`` where the token table takes the token."""


class PaddedPrefill:
    """logits: ``float32[rows, V]``, found: ``int32[2, rows]`` of the last such step, by the rows
    that are sampled from."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        tables: DeviceTables,
        forward: DeviceForward,
        *,
        has_graphs: bool,
    ) -> None:
        device, self._num_rows = model.ops.device, min(PREFILL_ROWS, config.max_requests)
        self._model = model
        self._tables = tables
        self._forward = forward
        most = config.max_prefill_tokens or config.num_kv_slots
        ladder = prefill_ladder(most) if has_graphs else ()
        self._sizes = {num_tokens: self._size(num_tokens) for num_tokens in ladder}
        self._form = PrefillForm([*self._sizes.values()], tables.sink_row, tables.sink_at)
        self._staging = Staging(device, len(self._form.numbers), 0)
        static = self._staging.static
        self._columns = {n: self._form.columns(static, size) for n, size in self._sizes.items()}
        self.graphs = Graphs(device, ladder, self._run, self._clear)
        self.logits = torch.zeros(self._num_rows, model.config.vocab_size, device=device)
        self.found = torch.zeros(2, self._num_rows, dtype=torch.int32, device=device)

    def _size(self, num_tokens: int) -> PrefillSize:
        model, counts = self._model, np.array([num_tokens], np.int32)
        is_gathered = self._forward.gathers_keys(counts, counts)
        most = gathered_keys(model.config.head_dim, model.ops.dtype.itemsize)
        tokens = tokens_per_block(self._attend_config(num_tokens, is_gathered), self._forward.group)
        return PrefillSize(num_tokens, self._num_rows, tokens, most if is_gathered else 0)

    def _attend_config(self, num_tokens: int, is_gathered: bool) -> AttendConfig:
        """As if all tokens were one row's, which they are most of the time."""
        counts = np.array([num_tokens], np.int32)
        return self._forward.attend_config(counts, is_gathered=is_gathered)

    def lay_out(self, plan: StepPlan, planner: Planner) -> int | None:
        """Fill in the rows that prefill. None: they do not fit, and run as ``mixed`` does."""
        if plan.num_prefill > self._num_rows:
            return None
        found = self.graphs.size_for(plan.num_prefill_tokens)
        if found is None:
            return None
        size, part = self._sizes[found], plan.prefill_alone
        if size.num_keys and int(plan.num_prefill_keys.sum()) > size.num_keys:
            return None
        planner.lay_out(part)
        planner.lay_out_prefill(part, size.tokens_per_block, gathers_keys=size.num_keys > 0)
        return found if self._form.fill(size, part.arrays) else None

    def send(self) -> None:
        """What was laid out goes to the device."""
        self._staging.send(self._form.numbers, [])

    def _clear(self, size: int) -> None:
        self._form.clear(self._sizes[size])
        self.send()

    def results(self, size: int, count: int) -> RowResults:
        """Of the first ``count`` rows that are sampled from, once ``size`` has run."""
        next_at = self._columns[size]["next_at"]
        return self.logits[:count], self.found[:, :count], next_at[:count]

    def _run(self, size: int) -> None:
        """Fill ``logits`` and ``found``, and put the greedy tokens into the token table."""
        sent = self._columns[size]
        config = self._attend_config(size, self._sizes[size].num_keys > 0)
        hidden = self._forward.padded(sent, config)
        best_of(self._model.logits(hidden, out=self.logits), self.found)
        self._tables.tokens.scatter_(0, sent["next_at"], self.found[0])

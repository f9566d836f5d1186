"""The launches of one step: updates, state ops, folds, forward, sampling, results on their way.

Owns: the order of launches, where each takes its numbers from.
Does not know: queues of steps, what comes up from them.

Invariants:
- All launches go to the current stream, in the order of steps.
- What a launch reads from the host is pinned, and unchanged until a fence behind it has passed.
- Rows that prefill and rows that decode may run in two forwards of one step, padded each: neither
  reads what the other writes.
- Nothing waits, but for rows whose sampling needs the host, and for prompt logprobs.
Read next: ``device_batch.py`` (the numbers), ``device_forward.py``, ``device_prefill.py``,
``staging.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.device_bytes import GATHERED_KEYS, ladder
from hyradix.kernels.argmax.triton import best_of
from hyradix.kernels.attention.triton_gather import KEYS_PER_BLOCK
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array, PromptLogprobs, TokenLogprobs
from hyradix.runner.decode_form import DecodeForm
from hyradix.runner.device_batch import Planner, StepPlan
from hyradix.runner.device_forward import DeviceForward
from hyradix.runner.device_log import LAST, ROOM, SAVES, DeviceLog
from hyradix.runner.device_prefill import PaddedPrefill, RowResults
from hyradix.runner.device_tables import DeviceTables
from hyradix.runner.graphs import Graphs, capture_all
from hyradix.runner.pools import Pools
from hyradix.runner.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from hyradix.runner.request_table import RequestTable
from hyradix.runner.staging import Numbers, Pending, Results, Staging
from hyradix.sampling.device_picking import draw_into
from hyradix.sampling.row_controls import Drawn
from hyradix.spec_decode.acceptance import TokenSampler

OnDevice = Mapping[str, torch.Tensor]
BeforeForward = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Launched:
    """found: ``int32[2, M]`` tokens and faults by sampling row, or their way to the host."""

    found: Pending | Int32Array
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompts: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Says that a step is made up, and runs as steps do that no graph holds. wants_all: as if
    somebody asked for the hidden states of all tokens."""

    wants_all: bool


@dataclass(frozen=True, slots=True)
class Padded:
    """Sizes of the graphs that a step is; 0: it has no rows of the kind."""

    prefill: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward left. logits (or none, where nobody reads them), found: of M sampling rows,
    the latter with greedy tokens, which the token table has already. hidden: of all tokens, where
    their logprobs are asked for."""

    logits: torch.Tensor
    found: torch.Tensor
    next_at: torch.Tensor
    hidden: torch.Tensor | None = None


class Launcher:
    """Everything on the device, and the host's tables beside it."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        sampler: TokenSampler,
        before_forward: BeforeForward | None,
        has_graphs: bool,
    ) -> None:
        device, max_rows = model.ops.device, config.max_requests
        max_tokens = max_step_tokens(config)
        self._model = model
        self._sampler = sampler
        self._before_forward = before_forward
        self.scratch_bytes = model.ops.reserve(max_tokens, max_rows)
        self.pools = Pools(model.config, config, model.ops)
        self.move_states = model.ops.slot_mover(self.pools.states.tensors)
        self.table = RequestTable(config)
        self.tables = DeviceTables(config, device)
        self.log: DeviceLog | None = None
        if config.num_log_rows:
            self.log = DeviceLog(model, config, self.pools.states)
        form = DecodeForm(max_rows, self.tables.sink_row, self.tables.sink_at)
        self._form = form
        key_blocks = 2 * GATHERED_KEYS // KEYS_PER_BLOCK
        num_extra = 8 * max_tokens + 64 * max_rows + key_blocks
        self._staging = Staging(device, len(form.numbers), num_extra)
        self._results = Results(device, max_rows)
        static = self._staging.static
        self._columns = [form.columns(static, size) for size in range(max_rows + 1)]
        self._forward = DeviceForward(
            model, config, self.tables, self.pools.memory, self.log, self._columns
        )
        self.planner = Planner(self.table, self.tables, form, self.log)
        sizes = ladder(max_rows) if has_graphs else ()
        self._decodes = Graphs(device, sizes, self._forward.decode, self._clear_decodes)
        self._prefill = PaddedPrefill(
            model, config, self.tables, self._forward, has_graphs=has_graphs
        )

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture the graphs on padding alone."""
        capture_all([self._decodes, self._prefill.graphs], on_progress)

    def rehearse_padded(self) -> None:
        """Padded steps of every size, on padding alone."""
        self._decodes.rehearse()
        self._prefill.graphs.rehearse()

    def _clear_decodes(self, _: int) -> None:
        self._form.clear()
        self._staging.send(self._form.numbers, [])

    def rehearse_moves(self) -> None:
        """Folds and copies of padding, which move nothing."""
        nothing = torch.zeros(2, dtype=torch.int32, device=self.tables.tokens.device)
        self.move_states(nothing, nothing)
        if self.log is not None:
            self.log.rehearse()

    def launch(
        self, plan: StepPlan, drawn: list[Drawn], *, needs_host: bool, made_up: MadeUp | None
    ) -> Launched:
        """Launch a step. drawn: rows that sample on the device beyond the argmax."""
        num_rows = len(plan.order)
        wants_all = wants_prompt_logprobs(plan.batch, plan, self.table)
        wants_all |= made_up is not None and made_up.wants_all
        padded = None if wants_all or made_up is not None else self._padded(plan)
        if padded is None and num_rows:
            self._forward.lay_out(plan, self.planner)
        sent = self._send(plan, drawn)
        self._prepare(sent)
        if not num_rows:
            self._settle(sent)
            return Launched(np.zeros((2, 0), np.int32))
        if self._before_forward is not None:
            self._before_forward()
        if padded is None:
            computed = self._mixed(plan, sent, wants_all)
        else:
            computed = self._replay(plan, padded, sent, needs_logits=needs_host or bool(drawn))
        if needs_host:
            self._settle(sent)  # what was sent is there until more is sent
            return self._sample_on_host(plan, computed)
        launched = self._sample(plan, computed, sent, drawn)
        self._settle(sent)
        return launched

    def _padded(self, plan: StepPlan) -> Padded | None:
        """The graphs that a step is, their numbers laid out. None: it is none."""
        decodes: int | None = 0
        prefill: int | None = 0
        if plan.num_decodes:
            decodes = self._decodes.size_for(plan.num_decodes)
        if plan.num_prefill and decodes is not None:
            prefill = self._prefill.lay_out(plan, self.planner)
        if decodes is None or prefill is None or not (decodes or prefill):
            return None
        if prefill:
            self._prefill.send()
        index = plan.decode_sampling
        if len(index) < plan.num_decodes:
            plan.arrays["sampling"] = index
        return Padded(prefill, decodes)

    def _send(self, plan: StepPlan, drawn: list[Drawn]) -> dict[str, torch.Tensor]:
        """One copy to the device; what was sent, by name."""
        arrays: dict[str, Numbers] = dict(plan.arrays)
        for i, group in enumerate(drawn):
            arrays[f"draw_index{i}"], arrays[f"draw_numbers{i}"] = group.index, group.numbers
        views = self._staging.send(self._form.numbers, list(arrays.values()))
        return dict(zip(arrays, views, strict=True))

    def _prepare(self, sent: OnDevice) -> None:
        """All that comes before the forward."""
        for name, table in (("token", self.tables.tokens), ("kv", self.tables.kv_slots)):
            if f"{name}_places" in sent:
                self.tables.write(table, sent[f"{name}_places"], sent[f"{name}_values"])
        if "op_sources" in sent:
            self.move_states(sent["op_sources"], sent["op_targets"])
        if self.log is not None:
            self.log.fold(ROOM, sent)

    def _settle(self, sent: OnDevice) -> None:
        """All that comes behind it."""
        if "copy_sources" in sent:
            self.move_states(sent["copy_sources"], sent["copy_targets"])
        if self.log is not None:
            self.log.fold(SAVES, sent)
            self.log.fold(LAST, sent)

    def _replay(
        self, plan: StepPlan, padded: Padded, sent: OnDevice, *, needs_logits: bool
    ) -> Computed:
        """The forwards, and greedy tokens."""
        parts = []
        if padded.prefill:
            self._prefill.graphs.replay(padded.prefill)
            parts.append(self._prefill.results(padded.prefill, plan.num_prefill_sampling))
        if padded.decodes:
            self._decodes.replay(padded.decodes)
            parts.append(self._decoded(plan, sent))
        if len(parts) == 1:
            return Computed(*parts[0])
        logits, found, next_at = zip(*parts, strict=True)
        whole = torch.cat(logits) if needs_logits else logits[0][:0]
        return Computed(whole, torch.cat(found, 1), torch.cat(next_at))

    def _decoded(self, plan: StepPlan, sent: OnDevice) -> RowResults:
        count = plan.num_decodes
        logits, found = self._forward.logits[:count], self._forward.found[:, :count]
        next_at = self._columns[count].next_at
        if "sampling" in sent:
            index = sent["sampling"]
            logits, found = logits.index_select(0, index), found.index_select(1, index)
            next_at = next_at.index_select(0, index)
        return logits, found, next_at

    def _mixed(self, plan: StepPlan, sent: OnDevice, wants_all: bool) -> Computed:
        """Where most tokens are sampled from, to leave out the others is not worth the copies."""
        next_at, last = sent["next_at"], sent["last"]
        wants_all |= 2 * len(last) > int(plan.cu_tokens[-1])
        columns = self._columns[plan.num_decodes]
        hidden = self._forward.mixed(plan, sent, columns, wants_all=wants_all)
        found = torch.zeros(2, len(next_at), dtype=torch.int32, device=next_at.device)
        logits = hidden.new_zeros(0, 0)
        if len(next_at):
            logits = self._model.logits(hidden.index_select(0, last) if wants_all else hidden)
            best_of(logits, found)
            self.tables.write(self.tables.tokens, next_at, found[0])
        return Computed(logits, found, next_at, hidden if wants_all else None)

    def _sample(
        self, plan: StepPlan, computed: Computed, sent: OnDevice, drawn: list[Drawn]
    ) -> Launched:
        """What is not greedy; then the tokens go to the table, and up."""
        found = computed.found
        for i, group in enumerate(drawn):
            draw_into(
                computed.logits,
                sent[f"draw_index{i}"],
                sent[f"draw_numbers{i}"],
                found,
                is_narrow=group.is_narrow,
                is_open=group.is_open,
            )
        if drawn:
            self.tables.write(self.tables.tokens, computed.next_at, found[0])
        return Launched(self._results.fetch(found), None, self._prompts(plan, computed))

    def _sample_on_host(self, plan: StepPlan, computed: Computed) -> Launched:
        """Wait for the logits, let the host choose, and tell the device."""
        rows, prompts = plan.sampling_rows, self._prompts(plan, computed)
        result = self._sampler.sample(computed.logits, rows, plan.positions)
        places = self.tables.token_at(rows, plan.positions)
        at, tokens = self._staging.send(self._form.numbers, [places, result.token_ids])
        self.tables.write(self.tables.tokens, at, tokens)
        found = np.stack([result.token_ids, result.is_faulty.astype(np.int32)])
        return Launched(found, result.logprobs, prompts)

    def _prompts(self, plan: StepPlan, computed: Computed) -> tuple[PromptLogprobs, ...]:
        """Waits where a row with prefill asks for them."""
        if computed.hidden is None:
            return ()
        return prompt_logprobs(
            plan.batch, plan, computed.hidden, self.table, self._model, self._sampler
        )


def max_step_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step: one chunk's worth of prefill beside decodes."""
    prefill = config.max_prefill_tokens or config.num_kv_slots
    return prefill + config.max_requests

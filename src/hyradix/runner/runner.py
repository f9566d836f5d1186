"""The data plane: one ``ScheduledBatch`` in, one ``StepOutput`` out.

Owns: the order of a step (updates, state ops, forward with saves, sampling), the pools, the table.
Does not know: the tree, the queue, why a batch is as it is.

Invariants:
- Steps run in the order they were submitted, each whole before the next.
- A row's result does not depend on the other rows beyond rounding; a row whose logits are not
  finite is reported faulty and harms nobody else.
- Logits are computed only where they are sampled from or asked for.
Read next: ``batch.py``, ``pools.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.ops import Array
from hyradix.layers.context import ForwardContext
from hyradix.models.decoder import Decoder
from hyradix.request import (
    SINK,
    BoolArray,
    Int32Array,
    Int64Array,
    PromptLogprobs,
    SamplingParams,
    ScheduledBatch,
    StateOp,
    StateOpKind,
    StepOutput,
    TokenLogprobs,
)
from hyradix.runner.batch import PreparedBatch, prepare
from hyradix.runner.pools import Pools
from hyradix.runner.prompt_logprobs import prompt_logprobs
from hyradix.runner.request_table import RequestTable

HiddenHook = Callable[[ScheduledBatch, Array], None]


class SampleResult(Protocol):
    """What sampling M rows gives."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def is_faulty(self) -> BoolArray: ...
    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]: ...


class TokenSampler(Protocol):
    """What the runner needs of ``hyradix.sampling.sampler.Sampler``."""

    def init_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        token_ids: Int32Array,
        num_prompt_tokens: int,
    ) -> None:
        """A request enters ``row`` with all tokens known so far."""

    def sample(self, logits: torch.Tensor, rows: Int32Array, positions: Int64Array) -> SampleResult:
        """Choose a token per row of ``logits`` float32 ``[M, V]``."""

    def logprobs_of(
        self, logits: torch.Tensor, token_ids: Int32Array, num_top: int
    ) -> TokenLogprobs:
        """Log probabilities of given tokens, for prompts."""


class ModelRunner:
    """Implements ``hyradix.request.Runner``; on the CPU ``submit`` runs the step.

    ``on_hidden`` (tests) sees every step's hidden states ``[T, hidden]`` before the final norm.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        sampler: TokenSampler,
        *,
        on_hidden: HiddenHook | None = None,
    ) -> None:
        model.ops.set_num_threads(config.num_threads)
        self.pools = Pools(model.config, config, model.ops)
        self.table = RequestTable(config)
        self._model = model
        self._sampler = sampler
        self._on_hidden = on_hidden
        self._done: deque[StepOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        """Run a step."""
        self._done.append(self.execute(batch))

    def collect(self) -> StepOutput:
        """What the oldest step that was not collected yet produced."""
        return self._done.popleft()

    def warm_up(self) -> None:
        """Compile every kernel, on the sinks alone: no live slot, row or token is touched."""
        one = np.zeros(1, np.int32)
        batch = ScheduledBatch(
            step=-1,
            rows=one,
            starts=one,
            num_tokens=one + 1,
            write_from=one + 1,  # nothing is written to the KV pool
            state_slots=one,
            samples=np.ones(1, np.bool_),
            max_nodes=one,
            max_accepted=one + 1,
            committed=one,
        )
        with torch.inference_mode():
            self.pools.states.apply((StateOp(StateOpKind.CLEAR, SINK),))
            prepared = prepare(batch, self.table)
            self._model.ops.warm_up(lambda: self._model.warm_up(self._context(prepared)))

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step and return what it produced."""
        self.table.apply(batch)
        self._init_rows(batch)
        self.pools.states.apply(batch.state_ops)
        if batch.num_rows == 0:
            return _nothing(batch.step)
        prepared = prepare(batch, self.table)
        hidden = self._model.forward(prepared.token_ids, self._context(prepared))
        if self._on_hidden is not None:
            self._on_hidden(batch, hidden)
        prompts = prompt_logprobs(batch, hidden, self.table, self._model, self._sampler)
        return self._sample(batch, prepared, hidden, prompts)

    def poison_kv(self, slots: list[int]) -> None:
        """Fill KV slots with NaN (tests)."""
        self.pools.kv.poison(slots)

    def poison_states(self, slots: list[int]) -> None:
        """Fill state slots with NaN (tests)."""
        self.pools.states.poison(slots)

    def _context(self, prepared: PreparedBatch) -> ForwardContext:
        return ForwardContext(prepared.states, prepared.queries, self.pools.memory)

    def _init_rows(self, batch: ScheduledBatch) -> None:
        """Tell the sampler who entered, with the tokens that came in the same batch."""
        for init in batch.row_inits:
            ends = [u.start + len(u.values) for u in batch.token_updates if u.row == init.row]
            known = self.table.token_ids[init.row, : max(ends, default=0)].copy()
            self._sampler.init_row(
                init.row, init.sampling, init.seed, known, init.num_prompt_tokens
            )

    def _sample(
        self,
        batch: ScheduledBatch,
        prepared: PreparedBatch,
        hidden: Array,
        prompts: tuple[PromptLogprobs, ...],
    ) -> StepOutput:
        """Sample where the batch says so and put the tokens in the table."""
        index = np.flatnonzero(batch.samples)
        if len(index) == 0:
            return _nothing(batch.step, prompts)
        last = prepared.states.cu_seqlens[1:][index] - 1
        if len(last) < hidden.shape[0]:
            hidden = self._model.ops.select(hidden, last)
        rows = prepared.queries.rows[index]
        positions = batch.starts[index] + batch.num_tokens[index]
        result = self._sampler.sample(self._model.logits(hidden), rows, positions.astype(np.int64))
        self.table.write_sampled(rows, positions, result.token_ids)
        return StepOutput(
            step=batch.step,
            rows=rows,
            token_ids=result.token_ids.reshape(-1, 1),
            num_tokens=np.ones(len(rows), np.int32),
            is_faulty=result.is_faulty,
            paths=np.zeros((len(rows), 1), np.int32),
            num_nodes=np.ones(len(rows), np.int32),
            logprobs=result.logprobs,
            prompt_logprobs=prompts,
        )


def _nothing(step: int, prompts: tuple[PromptLogprobs, ...] = ()) -> StepOutput:
    """A step in which no row sampled."""
    none = np.zeros(0, np.int32)
    empty = none.reshape(0, 1)
    return StepOutput(
        step, none, empty, none, np.zeros(0, np.bool_), empty, none, prompt_logprobs=prompts
    )

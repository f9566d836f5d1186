"""The data plane: one ``ScheduledBatch`` in, one ``StepOutput`` out.

Owns: the order of a step (updates, state ops, drafts, forward with saves, sampling and acceptance,
folds), the pools, the table.
Does not know: the tree, the queue, why a batch is as it is.

Invariants:
- Steps run in the order they were submitted, each whole before the next.
- A row's result does not depend on the other rows beyond rounding; a row whose logits are not
  finite is reported faulty and harms nobody else.
- Logits are computed only where they are sampled from or asked for, and so is what lies behind the
  last mixer, unless somebody wants more hidden states.
Read next: ``batch.py``, ``pools.py``, ``speculation.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.attention.queries import WantedTokens
from hyradix.kernels.ops import Array
from hyradix.kernels.tree_recurrence.ragged import RaggedTrees
from hyradix.layers.context import ForwardContext
from hyradix.models.decoder import Decoder
from hyradix.request import (
    Int32Array,
    PromptLogprobs,
    ScheduledBatch,
    StepOutput,
)
from hyradix.runner.batch import (
    PreparedBatch,
    TreeRows,
    last_tokens,
    logit_tokens,
    prepare,
    wanted_tokens,
)
from hyradix.runner.pools import Pools
from hyradix.runner.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from hyradix.runner.request_table import RequestTable
from hyradix.runner.speculation import make_speculation
from hyradix.runner.warm_up import compile_kernels, measure_costs
from hyradix.spec_config import RoundCosts
from hyradix.spec_decode.acceptance import Accepted, Candidates, TokenSampler, follow
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.hidden_window import WINDOW

HiddenHook = Callable[[ScheduledBatch, Array], None]


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
        self.speculation = make_speculation(config, model, self.pools, self.table)
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
        """Compile every kernel; no live slot, row or token is touched."""
        compile_kernels(self.speculation)

    def measure_costs(self) -> RoundCosts:
        """What parts of a round take here and now. Before the first request."""
        return measure_costs(self.speculation)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step and return what it produced."""
        self.table.apply(batch)
        self._init_rows(batch)
        self.pools.states.apply(batch.state_ops)
        self.speculation.enter(batch)
        output = self._forward(batch) if batch.num_rows else _nothing(batch.step)
        if batch.folds:
            self.speculation.fold(batch.folds)
        return output

    def poison_kv(self, slots: list[int]) -> None:
        """Fill KV slots with NaN (tests)."""
        self.pools.kv.poison(slots)

    def poison_states(self, slots: list[int]) -> None:
        """Fill state slots with NaN (tests)."""
        self.pools.states.poison(slots)

    def _context(
        self, prepared: PreparedBatch, arranged: RaggedTrees | None = None
    ) -> ForwardContext:
        layers = self.speculation.spec_layers
        return ForwardContext(
            prepared.states, prepared.queries, self.pools.memory, arranged, layers
        )

    def _init_rows(self, batch: ScheduledBatch) -> None:
        """Tell the sampler who entered, with the tokens that came in the same batch."""
        for init in batch.row_inits:
            ends = [u.start + len(u.values) for u in batch.token_updates if u.row == init.row]
            known = self.table.token_ids[init.row, : max(ends, default=0)].copy()
            self._sampler.init_row(
                init.row, init.sampling, init.seed, known, init.num_prompt_tokens
            )

    def _forward(self, batch: ScheduledBatch) -> StepOutput:
        """Draft, run the model, sample and accept, keep what was accepted."""
        speculation = self.speculation
        verified = speculation.begin(batch)
        prepared = prepare(batch, self.table, verified)
        arranged = speculation.arrange(batch, prepared, verified) if verified else None
        context, taken = self._context(prepared, arranged), logit_tokens(batch, prepared)
        wanted = self._wanted(batch, prepared, verified, taken)
        raw = self._model.forward(prepared.token_ids, context, wanted)
        if self._on_hidden is not None:
            self._on_hidden(batch, raw)
        prompts: tuple[PromptLogprobs, ...] = ()
        of_taken, bounds = raw, prepared.cu_tokens
        if wanted is not None:
            taken = np.searchsorted(wanted.index, taken).astype(np.int32)
            bounds = np.searchsorted(wanted.index, bounds).astype(np.int32)
        elif len(taken) < len(raw):
            prompts = prompt_logprobs(batch, prepared, raw, self.table, self._model, self._sampler)
        if len(taken) < len(raw):
            of_taken = self._model.ops.select(raw, taken)
        accepted = self._accept(batch, prepared, verified, of_taken)
        rows = batch.rows[prepared.order][batch.samples[prepared.order]]
        is_wanted = speculation.needs_hidden(batch, verified)
        hidden = self._model.normalize(raw) if is_wanted else None
        if speculation.uses_hidden and prepared.num_plain:
            speculation.keep_hidden(batch, prepared, hidden)
        if verified is not None and arranged is not None:
            paths = [np.array(p, np.int32) for p in accepted.paths[-len(verified.index) :]]
            first = int(prepared.cu_tokens[prepared.num_plain])
            of_nodes = None if hidden is None else hidden[first:]
            speculation.keep(batch, arranged, verified, paths, of_nodes)
        speculation.learn(batch, prepared, accepted, raw, bounds, hidden)
        return _output(batch.step, rows, accepted, verified, prompts)

    def _wanted(
        self,
        batch: ScheduledBatch,
        prepared: PreparedBatch,
        verified: TreeRows | None,
        taken: Int32Array,
    ) -> WantedTokens | None:
        """The tokens whose hidden states anybody wants; None: all of them.

        taken: those whose logits are taken.
        """
        num_tokens = len(prepared.token_ids)
        wants_all = len(taken) == num_tokens or (
            self._on_hidden is not None
            or self.speculation.needs_hidden(batch, verified)
            or wants_prompt_logprobs(batch, prepared, self.table)
        )
        if wants_all:
            return None
        index = taken
        if self.speculation.window is not None:
            index = last_tokens(prepared, WINDOW)
        return None if len(index) == num_tokens else wanted_tokens(prepared, index, verified)

    def _accept(
        self,
        batch: ScheduledBatch,
        prepared: PreparedBatch,
        verified: TreeRows | None,
        hidden: Array,
    ) -> Accepted:
        """Sample where the batch says so, follow the drafts, put the tokens in the table.

        hidden: of ``logit_tokens``.
        """
        num_plain = prepared.num_plain
        plain = prepared.order[:num_plain]
        is_sampled = batch.samples[plain]
        sampling = plain[is_sampled]
        positions = batch.starts[sampling] + batch.num_tokens[sampling] - 1
        if verified is None:
            return self._sample(batch.rows[sampling], positions, hidden)
        alone = Drafts.roots(np.full(len(sampling), -1, np.int32))
        cu_nodes = np.concatenate(
            [alone.cu_nodes, alone.cu_nodes[-1] + verified.trees.cu_nodes[1:]]
        )
        candidates = Candidates(
            rows=np.concatenate([batch.rows[sampling], batch.rows[verified.index]]),
            positions=np.concatenate([positions, batch.starts[verified.index]]),
            cu_nodes=cu_nodes,
            parents=np.concatenate([alone.parents, verified.trees.parents]),
            token_ids=np.concatenate([alone.token_ids, verified.token_ids]),
            max_accepted=np.concatenate([alone.num_nodes, batch.max_accepted[verified.index]]),
        )
        accepted = follow(self._sampler, self._model.logits(hidden), candidates)
        for row, position, tokens in zip(
            candidates.rows.tolist(), candidates.positions, accepted.token_ids, strict=True
        ):
            self.table.write_sampled(row, int(position) + 1, tokens)
        return accepted

    def _sample(self, rows: Int32Array, positions: Int32Array, hidden: Array) -> Accepted:
        """Where nothing is drafted: one token for each row."""
        if len(rows) == 0:
            return Accepted([], [], np.zeros(0, np.bool_), ())
        places = positions.astype(np.int64) + 1
        result = self._sampler.sample(self._model.logits(hidden), rows, places)
        self.table.write_next(rows, places, result.token_ids)
        tokens = [[token] for token in result.token_ids.tolist()]
        return Accepted([[0]] * len(rows), tokens, result.is_faulty, result.logprobs)


def _output(
    step: int,
    rows: Int32Array,
    accepted: Accepted,
    verified: TreeRows | None,
    prompts: tuple[PromptLogprobs, ...],
) -> StepOutput:
    num_tokens = np.array([len(tokens) for tokens in accepted.token_ids], np.int32)
    num_nodes = np.ones(len(rows), np.int32)
    if verified is not None:
        num_nodes[-len(verified.index) :] = np.diff(verified.trees.cu_nodes)
    return StepOutput(
        step=step,
        rows=rows.astype(np.int32),
        token_ids=_padded(accepted.token_ids),
        num_tokens=num_tokens,
        is_faulty=accepted.is_faulty,
        paths=_padded(accepted.paths),
        num_nodes=num_nodes,
        logprobs=accepted.logprobs,
        prompt_logprobs=prompts,
    )


def _padded(lists: list[list[int]]) -> Int32Array:
    """``int32[M, K]`` with -1 behind each list; K is at least 1."""
    table = np.full((len(lists), max(map(len, lists), default=1)), -1, np.int32)
    for i, values in enumerate(lists):
        table[i, : len(values)] = values
    return table


def _nothing(step: int) -> StepOutput:
    """A step without rows."""
    none = np.zeros(0, np.int32)
    empty = none.reshape(0, 1)
    return StepOutput(step, none, empty, none, np.zeros(0, np.bool_), empty, none)

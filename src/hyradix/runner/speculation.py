"""Drafts and deferred states inside one step: the parts before and behind the forward.

Owns: the order of a round (bring the state up, propose, arrange; then keep, reorder, learn) and
which decode rows are verified as trees. Does not know: how drafts are found, how states are kept.

Invariants:
- A step in which no row is followed or verified does what it would without a proposer, but for
  noting which slots were passed over and, where drafts are automatic, what of hidden states.
- A verify leaves the pools' states as they were; they move in ``keep`` (snapshot) or later.
- With ``log`` and ``replay`` every decode row is a tree (a root alone, without drafts): a state
  never runs past what the host has committed. With ``snapshot`` a row without drafts decodes in
  place.
Source: DESIGN section 6. Read next: ``spec_decode/proposer.py``, ``spec_decode/state_keeping.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.ops import Array
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees
from hyradix.kernels.tree_recurrence.rules import RULES
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.models.decoder import Decoder
from hyradix.request import BoolArray, Int32Array, ScheduledBatch, StateFold, StateSave
from hyradix.runner.batch import PreparedBatch, TreeRows
from hyradix.runner.pools import Pools
from hyradix.runner.request_table import RequestTable
from hyradix.spec_decode.acceptance import Accepted
from hyradix.spec_decode.build import build_proposer
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.hidden_window import WINDOW, HiddenWindow
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound, Proposer
from hyradix.spec_decode.state_keeping import StateKeeper, make_keeper
from hyradix.state_bytes import SpecShape, SpecStateMode

_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class Speculation:
    """proposer None: no drafts. keeper and mode None: decode in place."""

    config: EngineConfig
    model: Decoder
    pools: Pools
    table: RequestTable
    proposer: Proposer | None
    keeper: StateKeeper | None
    mode: SpecStateMode | None
    has_hidden: BoolArray
    """``bool[max_requests]``: whether the row's working slot holds a hidden state, not zeros."""
    own_from: Int32Array
    """``int32[max_requests]``: the first position of each row whose KV slot was not shared when it
    was admitted; kept where there is a window."""
    window: HiddenWindow | None
    """What rows that were passed over are told when they are followed again; None: nothing."""

    @property
    def spec_layers(self) -> tuple[SpecLayer, ...]:
        """The draft buffers, by recurrent layer."""
        return self.keeper.layers if self.keeper is not None else ()

    @property
    def uses_hidden(self) -> bool:
        """Whether the target's hidden states are kept."""
        return self.proposer is not None and self.proposer.uses_hidden

    def needs_hidden(self, batch: ScheduledBatch, verified: TreeRows | None) -> bool:
        """Whether anybody wants the hidden states of all tokens of this step."""
        return self.uses_hidden and (verified is not None or _num_followed(batch) > 0)

    def enter(self, batch: ScheduledBatch) -> None:
        """Requests enter rows, after the copies that their states begin with."""
        if not batch.row_inits:
            return
        at = {row: i for i, row in enumerate(batch.rows.tolist())}
        for init in batch.row_inits:
            self.has_hidden[init.row] = True
            if self.keeper is not None:
                self.keeper.enter(init.row)
            if self.window is not None:
                self.window.enter(init.row)
                self.own_from[init.row] = batch.write_from[at[init.row]]
            if self.proposer is not None:
                i = at[init.row]
                start, hidden = int(batch.starts[i]), None
                if self.pools.states.hidden is not None and start > 0:
                    hidden = self.pools.states.hidden[0, int(batch.state_slots[i])]
                self.proposer.enter(init.row, start, hidden)

    # ---- before the forward ---------------------------------------------------------------------

    def begin(self, batch: ScheduledBatch) -> TreeRows | None:
        """Bring lagging states up where the round needs it, then draft; None: no trees."""
        if self.keeper is None:
            return None
        wants = _NONE
        if max(batch.max_nodes.tolist()) > 1:
            wants = np.flatnonzero((batch.max_nodes > 1) & batch.is_followed).astype(np.int32)
        if self.mode == "snapshot":
            if len(wants) == 0:
                return None
            index, drafts = wants, self._propose(batch, wants)
            if drafts.is_empty:
                return None
            is_drafted = drafts.num_nodes > 1
            if not is_drafted.all():
                kept = np.flatnonzero(is_drafted).astype(np.int32)
                index, drafts = index[kept], drafts.take(kept)
        else:
            index = np.flatnonzero(batch.max_nodes > 0).astype(np.int32)
            if len(index) == 0:
                return None
            rows, slots = batch.rows[index], batch.state_slots[index]
            self.keeper.begin(rows, slots, batch.starts[index], batch.committed[index])
            roots = self.table.token_ids[rows, batch.starts[index]]
            drafts = Drafts.roots(roots)
            if len(wants):
                places = np.searchsorted(index, wants).astype(np.int32)
                drafts = self._propose(batch, wants).spread(places, roots)
        trees = FlatTrees.of(drafts.cu_nodes, drafts.parents)
        return TreeRows(index, trees, drafts.token_ids)

    def _propose(self, batch: ScheduledBatch, wants: Int32Array) -> Drafts:
        """A tree for each of the rows ``wants``; a root alone where nothing can be drafted."""
        assert self.proposer is not None
        assert self.config.spec is not None
        shape = self.config.spec.shape
        if batch.draft_topk and batch.draft_topk != shape.topk:
            shape = replace(shape, topk=batch.draft_topk)
        columns = [batch.rows, batch.starts, batch.max_nodes, batch.max_accepted]
        if len(wants) < batch.num_rows:
            columns = [column[wants] for column in columns]
        rows, starts, max_nodes, max_accepted = columns
        return self.proposer.propose(
            DraftRound(rows, starts, max_nodes, max_accepted - np.int32(1), shape)
        )

    def arrange(
        self, batch: ScheduledBatch, prepared: PreparedBatch, verified: TreeRows
    ) -> RaggedTrees:
        """What the recurrent layers need of the trees."""
        assert self.keeper is not None
        first_token = prepared.cu_tokens[prepared.num_plain : -1]
        index = verified.index
        rows, slots, starts = batch.rows[index], batch.state_slots[index], batch.starts[index]
        return self.keeper.arrange(verified.trees, first_token, rows, slots, starts)

    def fold(self, folds: tuple[StateFold, ...]) -> None:
        """Bring the states of rows that have come to rest up to where they are kept."""
        assert self.keeper is not None, "nothing is deferred, so nothing is folded"
        self.keeper.fold(folds)

    # ---- behind the forward ---------------------------------------------------------------------

    def keep(
        self,
        batch: ScheduledBatch,
        arranged: RaggedTrees,
        verified: TreeRows,
        paths: list[Int32Array],
        hidden: Array | None,
    ) -> None:
        """The accepted runs into states, logs and table. hidden: ``[total nodes, hidden]``."""
        assert self.keeper is not None
        index = verified.index
        saves: list[StateSave] = []
        if batch.saves:
            rows = set(batch.rows[index].tolist())
            saves = [save for save in batch.saves if save.row in rows]
        self.has_hidden[batch.rows[index]] = True
        self.keeper.keep(arranged, batch.starts[index], paths, saves, hidden)
        counts = np.diff(verified.trees.cu_nodes).tolist()
        for i, path, count in zip(index.tolist(), paths, counts, strict=True):
            if count > 1:
                self.table.reorder(int(batch.rows[i]), int(batch.starts[i]), path, count)

    def keep_hidden(
        self, batch: ScheduledBatch, prepared: PreparedBatch, hidden: Array | None
    ) -> None:
        """The hidden states that belong to the plain rows' working states and saves.

        hidden: None where nobody is followed: zeros take the place of what stood there.
        """
        pool, states = self.pools.states.hidden, prepared.states
        if pool is None:
            return
        if hidden is None and not len(states.save_slots) and not np.count_nonzero(self.has_hidden):
            return
        rows = batch.rows[prepared.order[: prepared.num_plain]]
        if hidden is None:
            stale = states.slots[self.has_hidden[rows]]
            if len(stale) or len(states.save_slots):
                slots = np.concatenate([stale, states.save_slots])
                pool[0].index_fill_(0, torch.from_numpy(slots).to(pool.device, torch.long), 0.0)
                self.has_hidden[rows] = False
            return
        self.has_hidden[rows] = True
        target = self.model.ops.view(pool[0])
        target[states.slots] = hidden[states.cu_seqlens[1:] - 1]
        if len(states.save_slots):
            firsts = np.repeat(states.cu_seqlens[:-1], np.diff(states.save_offsets))
            target[states.save_slots] = hidden[firsts + states.save_at - 1]

    def learn(
        self,
        batch: ScheduledBatch,
        prepared: PreparedBatch,
        accepted: Accepted,
        raw: Array,
        bounds: Int32Array,
        hidden: Array | None,
    ) -> None:
        """Tell the proposer what the rows that it follows have consumed, and what comes next.

        raw: what the model's ``forward`` returned, with a window the last ``WINDOW`` tokens of each
        row at least. bounds: ``int32[N+1]``, where the rows' stand in it. hidden: of all tokens,
        normalised; None where nobody is followed.
        """
        if self.proposer is None or not self.proposer.keeps_up:
            return
        num_followed = 0 if hidden is None else _num_followed(batch)
        if num_followed == 0 and len(prepared.token_ids) == batch.num_rows:
            rows, starts = prepared.queries.rows, prepared.queries.positions
            self.proposer.pass_over(rows, prepared.queries.write_slots)
            if self.window is not None:
                self.window.pass_over(rows, starts + np.int32(1), raw)
            return
        if num_followed < batch.num_rows:
            self._pass_over(batch, prepared, raw, bounds)
        if num_followed == 0:
            return
        order = prepared.order
        sampling = np.cumsum(batch.samples[order]) - 1
        followed = np.flatnonzero(batch.is_followed[order])
        tokens: list[Int32Array] = []
        for i in followed.tolist():
            first, end = int(prepared.cu_tokens[i]), int(prepared.cu_tokens[i + 1])
            if i < prepared.num_plain:
                tokens.append(np.arange(first, end, dtype=np.int32))
            else:
                tokens.append(first + np.array(accepted.paths[sampling[i]], np.int32))
        order, sampling = order[followed], sampling[followed]
        rows, starts = batch.rows[order], batch.starts[order]
        ends = starts + np.array([len(part) for part in tokens], np.int32)
        has_next = batch.samples[order] & (ends < batch.num_slots[order])
        has_next[has_next] = ~accepted.is_faulty[sampling[has_next]]
        columns = np.minimum(ends, self.table.kv_slots.shape[1] - 1)
        consumed = None
        if hidden is not None:
            index = np.concatenate(tokens)
            is_all = len(index) == hidden.shape[0]
            consumed = hidden if is_all else self.model.ops.select(hidden, index)
        step = ConsumedTokens(
            rows=rows,
            starts=starts,
            ends=ends,
            write_from=batch.write_from[order],
            next_slots=np.where(has_next, self.table.kv_slots[rows, columns], 0),
            hidden=consumed,
        )
        self.proposer.learn(self._with_missed(step))

    def _with_missed(self, step: ConsumedTokens) -> ConsumedTokens:
        """The same, as if rows had consumed only now what they were passed over at."""
        if self.window is None or not self.window.has_any(step.rows, step.starts):
            return step
        ops, lengths = self.model.ops, step.ends - step.starts
        raw, counts = self.window.take(step.rows, step.starts)
        if not len(raw):
            return step
        missed = self.model.normalize(raw)
        assert step.hidden is not None
        hidden = ops.view(torch.cat([ops.tensor(missed), ops.tensor(step.hidden)]))
        parts = np.stack([counts, lengths], axis=1).reshape(-1)
        begins = np.stack([np.cumsum(counts), np.cumsum(lengths) + len(missed)], axis=1)
        begins = begins.reshape(-1) - parts
        offsets = np.cumsum(parts) - parts
        index = np.arange(len(hidden)) + np.repeat(begins - offsets, parts)
        hidden = ops.select(hidden, index.astype(np.int32))
        own_from = self.own_from[step.rows]
        return replace(step, starts=step.starts - counts, write_from=own_from, hidden=hidden)

    def _pass_over(
        self, batch: ScheduledBatch, prepared: PreparedBatch, raw: Array, bounds: Int32Array
    ) -> None:
        """Tell the proposer which slots the rows that are not followed have written."""
        assert self.proposer is not None
        if self.window is not None:
            places = np.flatnonzero(~batch.is_followed[prepared.order])
            of = prepared.order[places]
            ends, counts = batch.starts[of] + batch.num_tokens[of], batch.num_tokens[of]
            counts = np.minimum(counts, np.int32(WINDOW))
            firsts = bounds[places + 1] - np.cumsum(counts)
            tokens = np.arange(counts.sum()) + np.repeat(firsts, counts)
            missed = self.model.ops.select(raw, tokens.astype(np.int32))
            self.window.pass_over(batch.rows[of], ends, missed, counts)
        index = np.flatnonzero(~batch.is_followed)
        rows, starts = batch.rows[index], batch.starts[index]
        columns, counts = starts, batch.num_tokens[index]
        owners = rows
        begins = np.maximum(starts, batch.write_from[index])
        if counts.max(initial=0) > 1 or not np.array_equal(begins, starts):
            counts = np.maximum(starts + counts - begins, 0)
            offsets = np.cumsum(counts) - counts
            owners = np.repeat(rows, counts)
            columns = np.arange(len(owners)) + np.repeat(begins - offsets, counts)
        self.proposer.pass_over(rows, self.table.kv_slots[owners, columns])


def _num_followed(batch: ScheduledBatch) -> int:
    """A list, as it is short: numpy's own ways take several microseconds behind a forward."""
    return int(batch.is_followed.tolist().count(True))


def make_speculation(
    config: EngineConfig, model: Decoder, pools: Pools, table: RequestTable
) -> Speculation:
    """What ``config`` asks for. Raises ``ConfigError`` where the model lacks the draft head."""
    spec, proposer, window = config.spec, None, None
    if spec is not None:
        proposer = build_proposer(
            spec.proposer, model, table.token_ids, table.kv_slots, pools.memory
        )
        if spec.is_automatic and proposer.num_draft_layers:
            window = HiddenWindow(config.max_requests, model.ops)
    mode: SpecStateMode | None = "log" if config.num_log_rows else None
    shape = SpecShape(
        num_requests=config.max_requests, num_nodes=1, num_log_rows=config.num_log_rows
    )
    if spec is not None:
        mode = spec.state
        shape = spec.shape.spec_shape(config.max_requests, config.num_log_rows)
    keeper = None
    if mode is not None:
        recurrent = model.config.recurrent_shape(model.ops.dtype.itemsize)
        states = pools.states
        hidden = None if states.hidden is None else states.hidden[0]
        if hidden is not None:
            recurrent = replace(recurrent, hidden_size=hidden.shape[1])
        rule = next(rule for rule in RULES if rule.name == model.config.recurrence)
        keeper = make_keeper(
            mode, model.ops, rule, recurrent, shape, states.recurrent, states.conv, hidden
        )
        assert keeper.num_bytes == config.draft_bytes, "draft bytes were computed wrongly"
    has_hidden = np.ones(config.max_requests, np.bool_)
    own_from = np.zeros(config.max_requests, np.int32)
    return Speculation(
        config, model, pools, table, proposer, keeper, mode, has_hidden, own_from, window
    )

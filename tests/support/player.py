"""A hand-made scheduler for tests and benchmarks of the runner: no queue, no tree, no eviction.

Owns: rows, KV slots and state slots, handed out in order or scattered, never given back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hyradix.config import DeviceFacts, EngineConfig, Settings, resolve
from hyradix.models.decoder import Decoder
from hyradix.models.loader import model_facts
from hyradix.request import (
    RowInit,
    RowUpdate,
    SamplingParams,
    ScheduledBatch,
    StateOp,
    StateOpKind,
    StateSave,
    StepOutput,
    TokenLogprobs,
)
from hyradix.runner.runner import ModelRunner


@dataclass
class GreedyResult:
    token_ids: Any
    is_faulty: Any
    logprobs: Any


class GreedySampler:
    """The argmax; the stand-in for ``hyradix.sampling`` in tests of the data plane."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def init_row(self, row, params, seed, prompt_ids, num_prompt_tokens):
        self.known[row] = prompt_ids

    def sample(self, logits, rows, positions):
        logits = logits.cpu()
        is_faulty = ~torch.isfinite(logits).all(1).numpy()
        ids = logits.argmax(1).numpy().astype(np.int32)
        return GreedyResult(ids, is_faulty, (None,) * len(rows))

    def choose_plain(self, logits, rows):
        return None

    def is_end(self, row, token_id, position):
        return False

    def logprobs_of(self, logits, token_ids, num_top):
        logprobs = logits.cpu().log_softmax(1)
        own = logprobs.gather(1, torch.from_numpy(token_ids).long()[:, None])
        top = logprobs.topk(num_top, 1)
        ranks = (logprobs > own).sum(1).int().numpy() + 1
        return TokenLogprobs(
            token_ids,
            own[:, 0].numpy(),
            ranks,
            top.indices.int().numpy(),
            top.values.numpy(),
        )


@dataclass
class Row:
    tokens: list[int]
    state: int
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def make_config(model: Decoder, **settings: Any) -> EngineConfig:
    options = {
        "max_requests": 4, "max_context": 256, "kv_slots": 1024, "states": 16, "num_threads": 2,
        **settings,
    }  # fmt: skip
    kind = "cuda" if model.ops.name == "triton" else "cpu"  # whose pools have the weights' type
    dtype = str(model.ops.dtype).removeprefix("torch.")
    facts = model_facts(model.config, dtype, device=kind)
    device = DeviceFacts(kind="cpu", free_bytes=1 << 33, num_threads=2)
    return resolve(Settings(**options), facts, device)


class Player:
    """``keep_logits``: keep the logits of every computed position of each row."""

    def __init__(
        self,
        model: Decoder,
        *,
        keep_logits: bool = True,
        scatter: bool = False,
        sampling: SamplingParams | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.config = make_config(model, **settings)
        self._keep_logits = keep_logits
        self.runner = self.make_runner()
        slots = np.arange(1, self.config.num_kv_slots + 1, dtype=np.int32)
        if scatter:
            np.random.default_rng(0).shuffle(slots)
        self._slots = slots
        self._used = 0
        self._next_state = 1
        self.sampling = sampling or SamplingParams(temperature=0.0)
        self.rows: dict[int, Row] = {}
        self._pending: dict[str, list[Any]] = {"inits": [], "tokens": [], "kv": [], "ops": []}
        self.steps = 0

    def make_runner(self) -> Any:
        """What runs the steps."""
        hook = self._keep if self._keep_logits else None
        return ModelRunner(self.model, self.config, GreedySampler(), on_hidden=hook)

    def new_state(self) -> int:
        self._next_state += 1
        return self._next_state - 1

    @property
    def table(self) -> Any:
        """The host's request table."""
        return self.runner.table

    def new_kv(self, count: int) -> Any:
        self._used += count
        return self._slots[self._used - count : self._used]

    def add(self, tokens: list[int], *, source: int | None = None, done: int = 0) -> int:
        """A request in a new row: cold, or from the state in slot ``source`` at depth ``done``."""
        row = len(self.rows)
        state = self.new_state()
        self.rows[row] = Row(list(tokens), state, done)
        pending = self._pending
        pending["inits"].append(RowInit(row, self.sampling, 0, len(tokens)))
        pending["tokens"].append(RowUpdate(row, 0, np.array(tokens, np.int32)))
        if source is None:
            pending["ops"].append(StateOp(StateOpKind.CLEAR, state))
        else:
            pending["ops"].append(StateOp(StateOpKind.COPY, state, source))
        return row

    def share_kv(self, row: int, other: int, count: int) -> None:
        """The first ``count`` KV slots of ``row`` are those of ``other``."""
        values = self.table.kv_slots[other, :count].copy()
        self._pending["kv"].append(RowUpdate(row, 0, values))

    def step(
        self,
        work: dict[int, int],
        *,
        saves: tuple[StateSave, ...] = (),
        write_from: dict[int, int] | None = None,
        sample: bool | None = None,
        trees: dict[int, tuple[int, int]] | None = None,
    ) -> StepOutput:
        """Compute ``work[row]`` more tokens of each row; sample where a row's tokens run out.

        trees: (max_nodes, max_accepted) of rows that decode their one known token with drafts.
        """
        rows = [self.rows[row] for row in work]
        shared, limits = write_from or {}, {row: (0, 1) for row in work} | (trees or {})
        for row, count in work.items():
            start = max(self.rows[row].done, shared.get(row, 0))
            fresh = self.rows[row].done + max(count, limits[row][0]) - start
            if fresh > 0:
                self._pending["kv"].append(RowUpdate(row, start, self.new_kv(fresh)))
        starts = np.array([r.done for r in rows], np.int32)
        counts = np.array(list(work.values()), np.int32)
        ends = [r.done + n for r, n in zip(rows, work.values(), strict=True)]
        at_end = [end == len(r.tokens) for r, end in zip(rows, ends, strict=True)]
        pending, self._pending = self._pending, {"inits": [], "tokens": [], "kv": [], "ops": []}
        batch = ScheduledBatch(
            step=self.steps,
            rows=np.array(list(work), np.int32),
            starts=starts,
            num_tokens=counts,
            write_from=np.array(
                [shared.get(row, s) for row, s in zip(work, starts, strict=True)], np.int32
            ),
            state_slots=np.array([r.state for r in rows], np.int32),
            samples=np.array(at_end if sample is None else [sample] * len(rows), np.bool_),
            max_nodes=np.array([limits[row][0] for row in work], np.int32),
            max_accepted=np.array([limits[row][1] for row in work], np.int32),
            committed=starts,
            num_slots=np.maximum(ends, starts + [limits[row][0] for row in work]).astype(np.int32),
            is_followed=np.ones(len(rows), np.bool_),
            row_inits=tuple(pending["inits"]),
            token_updates=tuple(pending["tokens"]),
            kv_updates=tuple(pending["kv"]),
            state_ops=tuple(pending["ops"]),
            saves=saves,
        )
        self.steps += 1
        self.runner.submit(batch)
        out = self.runner.collect()
        for r, end in zip(rows, ends, strict=True):
            r.done = end
        for row, ids, count in zip(
            out.rows.tolist(), out.token_ids.tolist(), out.num_tokens.tolist(), strict=True
        ):
            self.rows[row].tokens += ids[:count]
            self.rows[row].done += count - 1
        return out

    def _keep(self, batch: ScheduledBatch, hidden: torch.Tensor) -> None:
        logits = self.model.logits(hidden)
        is_tree = (batch.max_nodes > 0) & (self.runner.speculation.keeper is not None)
        order = np.argsort(is_tree, kind="stable")  # as the runner has them
        parts = logits.split(batch.num_tokens[order].tolist())
        for row, part in zip(batch.rows[order].tolist(), parts, strict=True):
            self.rows[row].logits.append(part.clone())

    def logits_of(self, row: int) -> torch.Tensor:
        return torch.cat(self.rows[row].logits)

"""Engines in which rows are followed by a fixed pattern, and what their draft layer wrote.

Owns: ``Following`` (who is followed, who has drafts, by position alone) and ``Seen``, a record of
every draft and of the draft layer's KV, by request and position. So two engines that follow in
different ways can be compared where both of them drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hyradix.engine.engine import Engine
from hyradix.request import Request, SamplingParams, ScheduledBatch
from hyradix.runner.background import BackgroundRunner
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.scheduler.drafting import NO_DRAFTS, Drafting
from hyradix.scheduler.request_state import RequestState
from hyradix.spec_decode.mtp import MtpProposer
from tests.support.demo import DemoEngines

PROMPT = -1
Pattern = Callable[[int, int], bool]
"""Whether a request, named by its seed, is followed where so many tokens of its reply are consumed;
``PROMPT``: while its prompt is computed."""


class Following(Drafting):
    """``pattern`` says who is followed. rounds: where alone drafts are asked for; None: as soon as
    a followed request can have some."""

    def __init__(self, engine: Engine, pattern: Pattern, rounds: set[tuple[int, int]] | None):
        super().__init__(engine.scheduler.config.spec)
        spec = engine.scheduler.config.spec
        assert spec is not None
        self.topk = spec.shape.topk
        self._pattern, self._rounds = pattern, rounds
        engine.scheduler._drafting = self
        engine.scheduler._rows._drafting = self

    def admit(self, state: RequestState, num_running: int) -> None:
        state.is_followed = self._pattern(state.request.seed, PROMPT)

    def begin_step(self, decodes: Sequence[RequestState], *, is_waited_for: bool) -> bool:
        for state in decodes:
            depth = state.num_scheduled_tokens - state.num_prompt_tokens
            state.is_followed = self._pattern(state.request.seed, depth)
        return True

    def limit(self, state: RequestState) -> tuple[int, int]:
        at = state.request.seed, state.num_scheduled_tokens
        wanted = state.is_followed if self._rounds is None else at in self._rounds
        return super().limit(state) if wanted else NO_DRAFTS


@dataclass
class Seen:
    """By (seed, tokens consumed): drafts with their parents; K and V of the draft layer from column
    1 on. ``owners``: seed of the request in each row."""

    drafts: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    kv: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)


class WatchedRunner(ModelRunner):
    """Fills ``seen``."""

    seen: Seen

    def execute(self, batch: ScheduledBatch):
        self.seen.owners.update({init.row: init.seed for init in batch.row_inits})
        return super().execute(batch)

    def watch(self) -> None:
        self.seen = seen = Seen()
        proposer, ops = self.speculation.proposer, self.speculation.model.ops
        assert isinstance(proposer, MtpProposer)
        propose, learn = proposer.propose, proposer.learn

        def watched_propose(batch):
            drafts = propose(batch)
            for i, (row, start) in enumerate(zip(batch.rows, batch.starts, strict=True)):
                a, b = drafts.cu_nodes[i : i + 2].tolist()
                if b - a > 1:
                    ids, parents = drafts.token_ids[a:b].tolist(), drafts.parents[a:b].tolist()
                    at = seen.owners[int(row)], int(start)
                    seen.drafts[at] = list(zip(ids, parents, strict=True))
            return drafts

        def watched_learn(step):
            learn(step)
            for row, end, slot in zip(step.rows, step.ends, step.next_slots, strict=True):
                slots = self.table.kv_slots[row, 1 : end + (slot > 0)].astype(np.int64)
                parts = [ops.tensor(pool)[slots].flatten(1) for pool in (proposer._k, proposer._v)]
                seen.kv[seen.owners[int(row)], int(end)] = torch.cat(parts, dim=1)

        proposer.propose, proposer.learn = watched_propose, watched_learn  # type: ignore[method-assign]


class WatchedEngines(DemoEngines):
    """Engines whose data plane is that of an automatic choice, whatever their shape."""

    last: WatchedRunner

    def start(self, model, config):
        if config.spec is not None:
            config = replace(config, spec=replace(config.spec, is_automatic=True))
        sampler = Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)
        self.last = WatchedRunner(model, config, sampler)
        if config.spec is not None:
            self.last.watch()
        else:
            self.last.seen = Seen()
        self.last.poison_kv(list(range(config.num_kv_slots + 1)))
        return (BackgroundRunner(self.last.execute) if config.overlap else self.last), None


def request_of(seed: int, prompt: list[int], max_tokens: int, **sampling: float) -> Request:
    """Its seed is its name."""
    return Request(
        request_id=str(seed),
        prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
        sampling=SamplingParams(
            **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
        ),
        seed=seed,
    )


def serve(
    engine: Engine, requests: list[Request], *, every: int = 0, aborts: dict[int, int] | None = None
) -> dict[int, list[int]]:
    """Replies by seed. One request enters every so many steps, 0: all at once; ``aborts``: seeds by
    the step in which their client is gone."""
    replies: dict[int, list[int]] = {request.seed: [] for request in requests}
    waiting, step = list(requests), 0
    while waiting or engine.has_work():
        while waiting and (not every or step % every == 0):
            assert engine.add(waiting.pop(0)) is None
            if every:
                break
        for seed in [seed for seed, at in (aborts or {}).items() if at == step]:
            engine.abort(str(seed))
        for output in engine.step():
            replies[int(output.request_id)] += output.token_ids
        step += 1
    return replies

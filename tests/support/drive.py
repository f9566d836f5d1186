"""What the scheduler's tests share: prompts, a harness whose steps can be in flight, the full O1.

``Driver`` takes a step apart: ``begin`` schedules and submits, ``end`` collects and commits, so a
test can act while a step is in flight, or keep several there.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hyradix.cache.invariants import check_idle
from hyradix.config import EngineConfig
from hyradix.request import FinishReason, MissReason, ScheduledBatch, StateOp
from tests.support.fake_runner import reference_output
from tests.support.harness import VOCAB, Harness, Record, make_config

CHUNKS = [0, 128, 16]
"""Unlimited, and two sizes of a prefill step (``max_prefill_tokens``)."""

EOS = 1

MODES = ("snapshot", "replay", "log")
CHAIN: dict[str, object] = {"spec": "ngram", "spec_topk": 1, "spec_steps": 4}
TREE: dict[str, object] = {"spec": "mtp", "spec_topk": 3, "spec_steps": 3, "spec_nodes": 10}
DRAFTS = {
    f"{name} {mode}": {**shape, "spec_state": mode}
    for name, shape in (("chain", CHAIN), ("tree", TREE))
    for mode in MODES
}
"""Chains of 4 drafts and trees of 10 nodes, with the state kept in each of the three ways."""

DEFERRED = {name: drafts for name, drafts in DRAFTS.items() if "snapshot" not in name}
"""Those where the working state lags behind, and is folded at the end."""


def text(seed: int, count: int, *, vocab_size: int = VOCAB) -> list[int]:
    """``count`` token ids that no other seed shares (beyond chance); never end-of-sequence."""
    return np.random.default_rng(seed).integers(2, vocab_size, size=count).tolist()


@functools.lru_cache(maxsize=4096)
def _reply(prompt: tuple[int, ...], count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(reference_output(list(prompt), count, vocab_size))


def reply(prompt: list[int], count: int, *, vocab_size: int = VOCAB) -> list[int]:
    """What a cold run says after ``prompt``: known before anything is served."""
    return list(_reply(tuple(prompt), count, vocab_size))


def small_vocab(vocab_size: int, **options: object) -> EngineConfig:
    """A config whose vocabulary is so small that end-of-sequence happens by itself."""
    return dataclasses.replace(make_config(**options), vocab_size=vocab_size)


class Driver(Harness):
    """See the module's docstring."""

    def __post_init__(self) -> None:
        super().__post_init__()
        submit = self.runner.submit

        def checked(batch: ScheduledBatch) -> None:
            self._check_writes(batch)
            submit(batch)

        self.runner.submit = checked  # type: ignore[method-assign]

    def _check_writes(self, batch: ScheduledBatch) -> None:
        """What the tree owns is read and never written: the fake's contents cannot tell."""
        owned = np.zeros(self.config.num_kv_slots + 1, dtype=np.bool_)
        for node in self.cache.tree.nodes():
            owned[node.kv_slots] = True
        parts = zip(batch.rows, batch.starts, batch.write_from, strict=True)
        for i, (row, start, write_from) in enumerate(parts):
            end = start + self.runner._num_written(batch, i)
            written = self.cache.table.kv_slots[row, max(start, write_from) : end]
            assert not owned[written].any(), "a step writes KV that the tree owns"

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet committed."""
        return self.scheduler.num_in_flight

    def end(self) -> None:
        """Collect and commit the oldest step in flight."""
        self.commit()

    def drain(self) -> None:
        """Commit everything in flight, then run until idle."""
        while self.num_in_flight:
            self.end()
        self.run()

    def close(self) -> None:
        """Until idle; O1 with lengths and finish reasons for everybody; O2."""
        self.drain()
        for record in self.records.values():
            expect(self, record)
        check_idle(self.cache)
        self.check_contents()


def expect(harness: Harness, record: Record) -> None:
    """O1 in full: the tokens, where they end, and why; and why KV was there without a state."""
    config, sampling = harness.config, record.state.request.sampling
    assert record.reason is not None, "a request never ended"
    if record.state.num_cached_tokens < record.state.num_kv_tokens:
        unnamed = (MissReason.NONE, MissReason.COLD)
        assert record.state.miss_reason not in unnamed, "a miss without a reason"
    if record.reason is FinishReason.ABORT:
        harness.verify(record)
        return
    limit = min(record.max_tokens, config.max_context - len(record.prompt))
    tokens = reply(record.prompt, limit, vocab_size=config.vocab_size)
    stops = set(sampling.stop_token_ids or ())
    if not sampling.ignore_eos:
        stops |= set(config.eos_token_ids)
    at = harness.stop_at.get(record.state.request_id)
    end, reason = limit, FinishReason.LENGTH
    for i, token in enumerate(tokens, 1):
        if i == at or (token in stops and i >= sampling.min_tokens):
            end, reason = i, FinishReason.STOP
            break
    assert record.output == tokens[:end], f"{record.state.request_id}: not what a cold run says"
    assert record.reason is reason


def cached(record: Record) -> tuple[int, int]:
    """(num_cached_tokens, num_kv_tokens) of a request."""
    return record.state.num_cached_tokens, record.state.num_kv_tokens


def state_ops(harness: Harness, first_step: int = 0) -> list[StateOp]:
    """Every StateOp that went down since ``first_step``."""
    return [op for batch in harness.runner.log[first_step:] for op in batch.state_ops]


def row_slots(harness: Harness, row: int, count: int) -> list[int]:
    """KV slots of a row's first ``count`` positions as the data plane sees them."""
    return harness.runner.kv_slots[row, :count].tolist()


def computed(harness: Harness, first_step: int = 0) -> int:
    """Positions computed since ``first_step``."""
    return sum(int(batch.num_tokens.sum()) for batch in harness.runner.log[first_step:])

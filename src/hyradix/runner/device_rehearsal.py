"""Made-up steps before the first request: every kernel is compiled, the largest step measured.

Owns: the steps. Does not know: what is in them beyond a ``ScheduledBatch``, requests, pools.

Invariants:
- Rows have the sinks as state and KV slots, and are entered anew by the first real request.
- On the CPU, where nothing is compiled, one small step stands for all.
Read next: ``device_runner.py`` (the caller).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from hyradix.config import EngineConfig
from hyradix.device_bytes import GATHERED_KEYS
from hyradix.request import (
    SINK,
    Int32Array,
    RowInit,
    SamplingParams,
    ScheduledBatch,
    StateOp,
    StateOpKind,
    StepOutput,
)
from hyradix.runner.device_launch import MadeUp

TOKENS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 128, 129, 256, 512)
"""Prefill tokens of steps that are tried: products of few rows are kernels of their own, and an
argument that is 1 or a multiple of 16 makes another of some."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
)


class Steps(Protocol):
    """The part of the runner that is used here."""

    config: EngineConfig

    def execute(self, batch: ScheduledBatch, *, made_up: MadeUp) -> StepOutput:
        """Run one step and wait for it."""


def rehearse(runner: Steps, on_progress: Callable[[int, int], None], *, is_device: bool) -> None:
    """Steps of many sizes, with every way to sample; with all hidden states too: the last layer's
    kernels then see many tokens, and no other layer may be of its kind."""
    batches = list(_batches(runner.config, TOKENS if is_device else (2,)))
    for done, batch in enumerate(batches):
        on_progress(done, len(batches))
        for wants_all in (False, True) if is_device else (False,):
            runner.execute(batch, made_up=MadeUp(wants_all))
    on_progress(len(batches), len(batches))


def rehearse_largest(runner: Steps) -> None:
    """The step that needs the most memory: all rows sample in the most wasteful way, while the
    hidden states of all tokens are kept for logprobs."""
    config = runner.config
    counts = _split(config.max_prefill_tokens, config)
    batch = _batch(config, counts, config.max_requests - len(counts), SAMPLINGS[-1:])
    runner.execute(batch, made_up=MadeUp(wants_all=True))


def _batches(config: EngineConfig, sizes: tuple[int, ...]) -> Iterator[ScheduledBatch]:
    for size in sizes:
        if size < min(config.max_prefill_tokens or size + 1, config.max_context):
            yield _batch(config, [size], min(config.max_requests - 1, 3), SAMPLINGS)
    if len(sizes) > 1:
        counts = _split(config.max_prefill_tokens, config)
        yield _batch(config, counts, config.max_requests - len(counts), SAMPLINGS)
        yield _behind_long_contexts(config)


def _behind_long_contexts(config: EngineConfig) -> ScheduledBatch:
    """More keys than are copied before attention, where the rows' contexts are that long."""
    longest = config.max_context - 1
    num_rows = min(config.max_requests, -(-(GATHERED_KEYS + 1) // longest))
    count = max(1, min(config.max_prefill_tokens or GATHERED_KEYS, longest) // num_rows)
    start = min(longest - count, GATHERED_KEYS)
    return _batch(config, [count] * num_rows, 0, SAMPLINGS[:1], start)


def _split(num_tokens: int, config: EngineConfig) -> list[int]:
    """Rows of at most the longest context, one row at least left to decode where there are two."""
    longest, most = config.max_context - 1, max(config.max_requests - 1, 1)
    counts = [longest] * min(num_tokens // longest, most)
    if len(counts) < most and num_tokens % longest:
        counts.append(num_tokens % longest)
    return counts


def _batch(
    config: EngineConfig,
    counts: list[int],
    num_decodes: int,
    samplings: tuple[SamplingParams, ...],
    start: int = 0,
) -> ScheduledBatch:
    """Prefill rows of ``counts`` tokens from ``start`` on, then decodes at position 1."""
    num_rows = len(counts) + num_decodes
    rows = np.arange(num_rows, dtype=np.int32)
    tokens = np.array(counts + [1] * num_decodes, np.int32)
    starts = np.array([start] * len(counts) + [1] * num_decodes, np.int32)
    is_decode = rows >= len(counts)
    inits = tuple(
        RowInit(row, samplings[row % len(samplings)], row, int(starts[row] + tokens[row]))
        for row in range(num_rows)
    )
    return ScheduledBatch(
        step=-1,
        rows=rows,
        starts=starts,
        num_tokens=tokens,
        write_from=starts,
        state_slots=_all(num_rows, SINK),
        samples=np.ones(num_rows, np.bool_),
        max_nodes=is_decode.astype(np.int32),
        max_accepted=_all(num_rows, 1),
        committed=starts,
        num_slots=starts + tokens,
        is_followed=np.ones(num_rows, np.bool_),
        row_inits=inits,
        state_ops=(StateOp(StateOpKind.CLEAR, SINK),),
    )


def _all(count: int, value: int) -> Int32Array:
    return np.full(count, value, np.int32)

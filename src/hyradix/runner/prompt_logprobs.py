"""Log probabilities of prompt tokens, from the hidden states of a prefill step.

Owns: which positions are asked for, computing their logits a bounded piece at a time.
Invariant: position p's hidden state gives the logits of token p + 1. Positions that are computed
again (after a preemption) are reported again.
Read next: ``runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from hyradix.kernels.ops import Array
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array, PromptLogprobs, ScheduledBatch, TokenLogprobs
from hyradix.runner.request_table import RequestTable

MAX_LOGITS = 1 << 24
"""Logits held at one time (64 MiB)."""


class PlainTokens(Protocol):
    """Which tokens of the step are whose: ``order`` ``int32[N]`` of the batch's rows, ``cu_tokens``
    ``int32[N+1]``; prompts are among the first ``num_plain`` rows."""

    @property
    def order(self) -> Int32Array: ...
    @property
    def cu_tokens(self) -> Int32Array: ...
    @property
    def num_plain(self) -> int: ...


class LogprobsOf(Protocol):
    """The part of the sampler that is used here."""

    def logprobs_of(
        self, logits: torch.Tensor, token_ids: Int32Array, num_top: int
    ) -> TokenLogprobs:
        """Log probabilities of given tokens."""


def prompt_logprobs(
    batch: ScheduledBatch,
    prepared: PlainTokens,
    hidden: Array,
    table: RequestTable,
    model: Decoder,
    sampler: LogprobsOf,
) -> tuple[PromptLogprobs, ...]:
    """For every row that asks for them: tokens [start + 1, min(start + n + 1, prompt length)).

    hidden: ``[T, hidden]`` of all tokens.
    """
    found = []
    for row, start, last, first, num_top in _asked(batch, prepared, table):
        ids = table.token_ids[row, start + 1 : last + 1].copy()
        states = hidden[first : first + last - start]
        logprobs = _in_pieces(states, ids, num_top, model, sampler)
        found.append(PromptLogprobs(row, start + 1, logprobs))
    return tuple(found)


def wants_prompt_logprobs(
    batch: ScheduledBatch, prepared: PlainTokens, table: RequestTable
) -> bool:
    """Whether ``prompt_logprobs`` finds any."""
    return next(_asked(batch, prepared, table), None) is not None


def _asked(
    batch: ScheduledBatch, prepared: PlainTokens, table: RequestTable
) -> Iterator[tuple[int, int, int, int, int]]:
    """Of rows that ask: row, first and last position, first token of the step, how many others."""
    plain = prepared.order[: prepared.num_plain]
    for i, first in zip(plain.tolist(), prepared.cu_tokens.tolist(), strict=False):
        row, start, count = int(batch.rows[i]), int(batch.starts[i]), int(batch.num_tokens[i])
        init = table.init_of(row)
        num_top = None if init is None else init.sampling.prompt_logprobs
        if init is not None and num_top is not None:
            last = min(start + count, init.num_prompt_tokens - 1)
            if last > start:
                yield row, start, last, first, num_top


def _in_pieces(
    hidden: Array, ids: Int32Array, num_top: int, model: Decoder, sampler: LogprobsOf
) -> TokenLogprobs:
    size = max(1, MAX_LOGITS // model.config.vocab_size)
    pieces = [
        sampler.logprobs_of(model.logits(hidden[i : i + size]), ids[i : i + size], num_top)
        for i in range(0, len(ids), size)
    ]
    return TokenLogprobs(
        token_ids=np.concatenate([p.token_ids for p in pieces]),
        logprobs=np.concatenate([p.logprobs for p in pieces]),
        ranks=np.concatenate([p.ranks for p in pieces]),
        top_ids=np.concatenate([p.top_ids for p in pieces]),
        top_logprobs=np.concatenate([p.top_logprobs for p in pieces]),
    )

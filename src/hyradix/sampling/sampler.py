"""Logits to token ids, for the rows of a batch.

Owns: what each request-table row asks of sampling, and the token counts of rows with penalties.
Does not know: the model, KV, states, when a request ends.
Invariant: a token depends on its row's (logits, params, seed, position, tokens so far) alone:
not on the other rows of the batch, their order, the row's number, or preemption.
Read next: ``adjusting.py`` and ``picking.py``, pure functions that other callers (verification of
drafts) can use with counts of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hyradix.request import BoolArray, Int32Array, Int64Array, SamplingParams, TokenLogprobs
from hyradix.sampling.adjusting import RowRules, TokenCounts, adjust
from hyradix.sampling.logprobs import logprobs_of
from hyradix.sampling.picking import Controls, pick
from hyradix.sampling.race import keys

_BLOCK = 32
"""Rows picked at a time: bounds the float64 copies of their logits."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One token per row. Numpy, on the host.

    token_ids: ``int32[M]``; 0 where faulty.
    is_faulty: ``bool[M]``: the row's logits held NaN or +inf, or nothing but -inf (also after
        biases and penalties).
    logprobs: one entry per row: None where not asked for or faulty.
    """

    token_ids: Int32Array
    is_faulty: BoolArray
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    rules: RowRules
    num_prompt_tokens: int
    counts: TokenCounts | None


class Sampler:
    """Samples for the rows of one request table."""

    def __init__(self, max_requests: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._rows: list[_Row | None] = [None] * max_requests
        self._seeds = np.zeros(max_requests, dtype=np.int64)
        self._is_plain = np.zeros(max_requests, dtype=np.bool_)

    def init_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        token_ids: Int32Array,
        num_prompt_tokens: int,
    ) -> None:
        """A request enters ``row``; what was known of that row is void.

        Args:
            params: already validated.
            seed: the request's; kept over preemption by the caller.
            token_ids: ``int32[T]``, the prompt, followed after a preemption by what was generated.
                Read now, not kept.
        """
        rules = RowRules.of(params, self._eos_token_ids)
        counts = None
        if rules.needs_counts:
            counts = TokenCounts(token_ids, num_prompt_tokens, counts_prompt=rules.counts_prompt)
        self._rows[row] = _Row(params, rules, num_prompt_tokens, counts)
        self._seeds[row] = seed
        needs_nothing = params.logprobs is None and not rules.apply_at(0)
        self._is_plain[row] = params.is_greedy and needs_nothing

    def sample(self, logits: torch.Tensor, rows: Int32Array, positions: Int64Array) -> SampleResult:
        """Pick the next token of each row, and count it for the row's penalties.

        Args:
            logits: ``float32[M, V]``; not modified.
            rows: ``int32[M]``, distinct, each initialised.
            positions: ``int64[M]``, the absolute position the new token will occupy.

        Cost: one argmax when all rows are greedy without penalties, biases or logprobs.
        """
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        plain = self.choose_plain(logits, rows)
        if plain is not None:
            return plain
        states = [self._row(int(row)) for row in rows]
        adjusted, is_faulty = self._adjust(logits, states, positions)
        picked = self._pick(adjusted, states, rows, positions)
        token_ids = np.where(is_faulty, 0, picked).astype(np.int32)
        for state, token, bad in zip(states, token_ids.tolist(), is_faulty.tolist(), strict=True):
            if state.counts is not None and not bad:
                state.counts.add(token)
        return SampleResult(token_ids, is_faulty, _logprobs(logits, states, token_ids, is_faulty))

    def choose_plain(self, logits: torch.Tensor, rows: Int32Array) -> SampleResult | None:
        """The best of every row of ``logits`` ``[P, V]``, if ``rows`` ask for nothing else.

        P may be any number: each of the P then belongs to one of ``rows``, and nothing is counted.
        None: some row samples, is penalised, or wants logprobs.
        """
        if not self._is_plain[rows].all():
            return None
        best = logits.argmax(dim=-1)
        # argmax treats NaN as the largest: the value at it tells all faults.
        is_faulty = ~logits.gather(1, best[:, None]).flatten().isfinite().cpu().numpy()
        token_ids = np.where(is_faulty, 0, best.cpu().numpy()).astype(np.int32)
        return SampleResult(token_ids, is_faulty, (None,) * len(logits))

    def is_end(self, row: int, token_id: int, position: int) -> bool:
        """Whether ``token_id`` at ``position`` ends the request, as the scheduler will see it."""
        state = self._row(row)
        num_output_tokens = position - state.num_prompt_tokens + 1
        is_ending = token_id in state.rules.ending_ids
        return is_ending and num_output_tokens >= state.params.min_tokens

    def logprobs_of(
        self, logits: torch.Tensor, token_ids: Int32Array, num_top: int
    ) -> TokenLogprobs:
        """Log probabilities of given tokens (of a prompt); see ``logprobs.logprobs_of``."""
        return logprobs_of(logits, token_ids, num_top)

    def _row(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} was not initialised"
        return state

    def _adjust(
        self, logits: torch.Tensor, states: list[_Row], positions: Int64Array
    ) -> tuple[torch.Tensor, BoolArray]:
        """Logits after each row's rules, faulty rows replaced by zeros; and which are faulty."""
        is_faulty = ~logits.amax(dim=-1).isfinite()
        adjusted = logits
        for i, state in enumerate(states):
            num_output_tokens = int(positions[i]) - state.num_prompt_tokens
            if state.rules.apply_at(num_output_tokens):
                adjusted = logits.clone() if adjusted is logits else adjusted
                adjust(adjusted[i], state.rules, state.counts, num_output_tokens)
        if adjusted is not logits:
            is_faulty |= ~adjusted.amax(dim=-1).isfinite()
        if bool(is_faulty.any()):
            adjusted = torch.where(is_faulty[:, None], 0.0, adjusted)
        faulty: BoolArray = is_faulty.cpu().numpy()
        return adjusted, faulty

    def _pick(
        self, logits: torch.Tensor, states: list[_Row], rows: Int32Array, positions: Int64Array
    ) -> Int64Array:
        is_greedy = np.array([state.params.is_greedy for state in states])
        picked = np.empty(len(states), dtype=np.int64)
        if is_greedy.any():
            picked[is_greedy] = _take(logits, is_greedy.nonzero()[0]).argmax(dim=-1).cpu().numpy()
        drawn = (~is_greedy).nonzero()[0]
        for i in range(0, len(drawn), _BLOCK):
            block = drawn[i : i + _BLOCK]
            controls = Controls.of([states[j].params for j in block], logits.device)
            key = torch.from_numpy(keys(self._seeds[rows[block]], positions[block]))
            chosen = pick(_take(logits, block), controls, key.to(logits.device))
            picked[block] = chosen.cpu().numpy()
        return picked


def _take(logits: torch.Tensor, index: Int64Array) -> torch.Tensor:
    if len(index) == len(logits):
        return logits
    return logits[torch.from_numpy(index).to(logits.device)]


def _logprobs(
    logits: torch.Tensor, states: list[_Row], token_ids: Int32Array, is_faulty: BoolArray
) -> tuple[TokenLogprobs | None, ...]:
    num_top = [-1 if s.params.logprobs is None else s.params.logprobs for s in states]
    asked = np.array([i for i, k in enumerate(num_top) if k >= 0 and not is_faulty[i]], np.int64)
    result: list[TokenLogprobs | None] = [None] * len(states)
    if len(asked):
        every = logprobs_of(_take(logits, asked), token_ids[asked], max(num_top))
        for j, i in enumerate(asked.tolist()):
            result[i] = TokenLogprobs(
                every.token_ids[j : j + 1],
                every.logprobs[j : j + 1],
                every.ranks[j : j + 1],
                every.top_ids[j : j + 1, : num_top[i]],
                every.top_logprobs[j : j + 1, : num_top[i]],
            )
    return tuple(result)

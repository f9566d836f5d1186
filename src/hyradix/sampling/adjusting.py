"""What changes logits before a token is picked: penalties, biases, endings not yet allowed.

Owns: the rules of one row, the token counts that penalties need, and the order of application:
repetition penalty, frequency and presence penalty, ``logit_bias``, ``min_tokens``.
Does not know: rows of a batch, randomness, temperature.
Invariant: the result depends on (logits row, rules, counts, number of output tokens) alone, and
counts built at once from known tokens equal counts grown token by token.
Read next: ``picking.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hyradix.request import Float32Array, Int32Array, Int64Array, SamplingParams


class TokenCounts:
    """How often each token was generated, over the distinct tokens seen so far.

    With ``counts_prompt`` the prompt's tokens are listed too (with a count of 0 unless they were
    generated as well). Memory: a few bytes per distinct token, independent of the vocabulary.
    """

    def __init__(
        self, token_ids: Int32Array, num_prompt_tokens: int, *, counts_prompt: bool
    ) -> None:
        output = token_ids[num_prompt_tokens:]
        ids = np.unique(token_ids if counts_prompt else output).astype(np.int64)
        self._size = len(ids)
        self._ids = np.empty(max(2 * self._size, 64), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self._size] = ids
        generated, counts = np.unique(output, return_counts=True)
        self._counts[np.searchsorted(ids, generated)] = counts
        self._index = {int(token): i for i, token in enumerate(ids)}

    @property
    def ids(self) -> Int64Array:
        """``int64[D]`` distinct tokens in no particular order. Valid until the next ``add``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Float32Array:
        """``float32[D]`` times each of ``ids`` was generated. Valid until the next ``add``."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one generated token. Cost: O(1) amortised."""
        i = self._index.get(token)
        if i is None:
            i = self._size
            if i == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._index[token] = i
            self._ids[i] = token
            self._size += 1
        self._counts[i] += 1


@dataclass(frozen=True, slots=True)
class RowRules:
    """What one request asks of its logits, in the form that is cheap to apply."""

    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias_ids: tuple[int, ...]
    biases: tuple[float, ...]
    min_tokens: int
    ending_ids: tuple[int, ...]
    """Tokens that would end the request; masked until ``min_tokens`` were generated."""

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> RowRules:
        """Read the rules out of ``params``."""
        bias = params.logit_bias or {}
        eos = () if params.ignore_eos else eos_token_ids
        return cls(
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            bias_ids=tuple(bias),
            biases=tuple(bias.values()),
            min_tokens=params.min_tokens,
            ending_ids=tuple(sorted({*eos, *(params.stop_token_ids or ())})),
        )

    @property
    def needs_counts(self) -> bool:
        """Whether any penalty is on."""
        return self.counts_prompt or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def counts_prompt(self) -> bool:
        """Whether the prompt's tokens are penalised too."""
        return self.repetition_penalty != 1.0

    def apply_at(self, num_output_tokens: int) -> bool:
        """Whether ``adjust`` would do anything for the next token."""
        return self.needs_counts or bool(self.bias_ids) or num_output_tokens < self.min_tokens


def adjust(
    logits: torch.Tensor, rules: RowRules, counts: TokenCounts | None, num_output_tokens: int
) -> None:
    """Apply the rules to one row of logits, in place.

    Args:
        logits: ``float32[V]``.
        counts: needed when ``rules.needs_counts``.
        num_output_tokens: tokens generated before the one to be picked.

    Source: presence and frequency as in OpenAI's API (over generated tokens only); repetition as
    in Keskar et al. 2019 (positive logits are divided, negative ones multiplied; prompt tokens
    and generated tokens alike).
    """
    if counts is not None and rules.needs_counts:
        _penalise(logits, rules, counts)
    if rules.bias_ids:
        ids = torch.tensor(rules.bias_ids, device=logits.device)
        logits[ids] += torch.tensor(rules.biases, dtype=logits.dtype, device=logits.device)
    if num_output_tokens < rules.min_tokens and rules.ending_ids:
        logits[torch.tensor(rules.ending_ids, device=logits.device)] = -torch.inf


def _penalise(logits: torch.Tensor, rules: RowRules, counts: TokenCounts) -> None:
    # Copies: the device may still read them when the next token is counted.
    ids = torch.tensor(counts.ids, device=logits.device)
    times = torch.tensor(counts.counts, device=logits.device)
    values = logits[ids]
    if rules.counts_prompt:
        penalty = rules.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
    values = values - rules.frequency_penalty * times
    logits[ids] = values - rules.presence_penalty * (times > 0)

"""What ``LLM.generate`` returns, and how outputs are gathered into it.

Owns: the result types (the field names that vLLM's users know). Does not know: the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyradix.engine.messages import RequestOutput, TokenLogprob
from hyradix.errors import HyradixError, RequestError, RequestFailedError
from hyradix.request import MissReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position: its log probability, its rank (1 = best), its text."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""Token id -> ``Logprob``: the token that stands there first, then the best alternatives."""


def at_position(item: TokenLogprob) -> PositionLogprobs:
    """The wire form of one position as a mapping."""
    result = {item.token_id: Logprob(item.logprob, item.rank, item.text)}
    for rank, (token_id, logprob, text) in enumerate(item.top, start=1):
        result.setdefault(token_id, Logprob(logprob, rank, text))
    return result


@dataclass(slots=True)
class Completion:
    """One reply. ``finish_reason``: "stop", "length", "abort"; ``stop_reason``: what stopped it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' logprobs, where they were asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(position[token_id].logprob for token_id, position in pairs)

    def extend(self, output: RequestOutput) -> None:
        """Add a delta."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += [at_position(item) for item in output.logprobs]
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_reason


@dataclass(slots=True)
class GenerationResult:
    """One prompt and its replies."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """Entry 0 is None: nothing comes before it."""
    num_cached_tokens: int = 0
    num_kv_tokens: int = 0
    miss_reason: MissReason = MissReason.NONE

    def extend(self, index: int, output: RequestOutput) -> None:
        """Add a delta of choice ``index``. Raises what the engine refused or failed with."""
        raise_error(output)
        self.outputs[index].extend(output)
        if index == 0:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_kv_tokens = output.num_kv_tokens
            self.miss_reason = output.miss_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if item is None else at_position(item) for item in output.prompt_logprobs
            ]


def raise_error(output: RequestOutput) -> None:
    """Raise the error that ``output`` carries, if any, as the class its code belongs to."""
    if output.error is None:
        return
    kind = _by_code(HyradixError.__subclasses__(), output.error_code) or RequestFailedError
    raise kind(output.error, param=output.error_param)


def _by_code(kinds: Sequence[type[HyradixError]], code: str | None) -> type[HyradixError] | None:
    for kind in kinds:
        if kind.code == code:
            return kind
        found = _by_code(kind.__subclasses__(), code)
        if found is not None:
            return found
    return RequestError if code == RequestError.code else None

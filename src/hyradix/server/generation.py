"""The choices of one HTTP request while the engine runs them.

Owns: which engine request is which choice, the tokens counted for usage, and the times measured.
Does not know: wire formats.
Invariant: an error of one choice ends them all; closing aborts what is unfinished.
Read next: ``streaming.py``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from hyradix.engine.messages import RequestOutput
from hyradix.engine.results import raise_error
from hyradix.errors import RequestFailedError
from hyradix.request import FinishReason, MissReason
from hyradix.server.metrics import ServerMetrics
from hyradix.server.replies import PromptTokensDetails, Usage


class Outputs(Protocol):
    """``engine.streams.OutputStream`` as the server uses it."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def __anext__(self) -> RequestOutput: ...
    def close(self) -> None: ...


class Generation:
    """Asynchronous iterator of (choice index, output). For one reader."""

    def __init__(
        self,
        reply_id: str,
        request_ids: Sequence[str],
        outputs: Outputs,
        prompt_lengths: Sequence[int],
        metrics: ServerMetrics,
        *,
        drops_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``drops_tokens``: run, but report nothing of what was sampled (``max_tokens`` 0)."""
        self.reply_id = reply_id
        self.num_choices = len(request_ids)
        self._outputs = outputs
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._num_prompt_tokens = sum(prompt_lengths)
        self._choices_per_prompt = len(request_ids) // len(prompt_lengths)
        self._metrics = metrics
        self._drops_tokens = drops_tokens
        self._clock = clock
        self._started_at = clock()
        self._last_at = [0.0] * len(request_ids)
        self._num_output_tokens = 0
        self._details = [PromptTokensDetails() for _ in prompt_lengths]

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """The next output. Raises ``HyradixError`` when a choice failed (all are over then)."""
        output = await self._outputs.__anext__()
        index = self._index[output.request_id]
        if output.error is not None:
            self.close()
            raise_error(output)
        if output.finish_reason is FinishReason.ABORT:
            self.close()
            raise RequestFailedError("the request was cancelled by the server")
        self._measure(index, output)
        self._note_prompt(index, output)
        if self._drops_tokens:
            output = _without_tokens(output)
        self._num_output_tokens += len(output.token_ids)
        return index, output

    def close(self) -> None:
        """Abort what is unfinished."""
        self._outputs.close()

    def usage(self) -> Usage:
        """Tokens so far; final once the iteration has ended. Each prompt counts once."""
        reasons = [d.miss_reason for d in self._details if d.miss_reason is not MissReason.NONE]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(d.cached_tokens for d in self._details),
                kv_tokens=sum(d.kv_tokens for d in self._details),
                miss_reason=reasons[0] if reasons else MissReason.NONE,
            ),
        )

    async def collect(self) -> list[RequestOutput]:
        """Read to the end; one output per choice that holds everything."""
        parts: list[list[RequestOutput]] = [[] for _ in range(self.num_choices)]
        async for index, output in self:
            parts[index].append(output)
        return [merge(outputs) for outputs in parts]

    def _note_prompt(self, index: int, output: RequestOutput) -> None:
        """Keep what the first choice of each prompt says; its siblings find it in the cache."""
        prompt, child = divmod(index, self._choices_per_prompt)
        if child == 0:
            self._details[prompt] = PromptTokensDetails(
                cached_tokens=output.num_cached_tokens,
                kv_tokens=output.num_kv_tokens,
                miss_reason=output.miss_reason,
            )

    def _measure(self, index: int, output: RequestOutput) -> None:
        now = self._clock()
        if output.token_ids:
            last_at = self._last_at[index]
            if last_at:
                self._metrics.inter_token.observe((now - last_at) / len(output.token_ids))
            else:
                self._metrics.first_token.observe(now - self._started_at)
            self._last_at[index] = now
        if output.is_finished:
            self._metrics.whole_request.observe(now - self._started_at)


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Deltas of one request, in order, as one output."""
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if any(o.logprobs is not None for o in outputs) else None,
        prompt_logprobs=next(
            (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None
        ),
    )


def _without_tokens(output: RequestOutput) -> RequestOutput:
    return msgspec.structs.replace(
        output,
        text="",
        token_ids=[],
        logprobs=[] if output.logprobs is not None else None,
        finish_reason=FinishReason.LENGTH if output.is_finished else None,
        stop_reason=None,
    )

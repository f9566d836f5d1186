"""The step loop: schedule, run, commit, render.

Owns: the text of running requests (detokenising, stop strings), and the order of the loop.
Does not know: sockets, HTTP, tensors. One instance, one thread.
Invariants: each accepted request gets exactly one finished ``RequestOutput``; ``step`` does not
raise because of one request.
Read next: ``scheduler/scheduler.py``, ``runner/runner.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hyradix.cache.invariants import check
from hyradix.config import EngineConfig
from hyradix.engine.messages import (
    CacheView,
    EngineInfo,
    EngineStats,
    RequestOutput,
    TokenLogprob,
    refusal_of,
)
from hyradix.engine.statistics import collect_stats, view_cache
from hyradix.engine.step_times import StepTimes
from hyradix.errors import HyradixError, RequestFailedError
from hyradix.request import FinishReason, PromptLogprobs, Request, Runner, TokenLogprobs
from hyradix.scheduler.progress import Progress
from hyradix.scheduler.request_state import RequestState
from hyradix.scheduler.scheduler import Scheduler
from hyradix.spec_config import RoundCosts
from hyradix.text.output_stream import OutputStream
from hyradix.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Reply:
    """The text side of one request."""

    stream: OutputStream
    text: str = ""
    stop_string: str | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def take_text(self) -> str:
        text, self.text = self.text, ""
        return text


class Engine:
    """See the module's docstring."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = info
        self.times = StepTimes(clock)
        """What the parts of the last step took."""
        self.scheduler = Scheduler(config, self, costs=costs)
        self._config = config
        self.runner = runner
        """The data plane; benches look at its stream, tests at its pools."""
        self._tokenizer = tokenizer
        self._replies: dict[str, _Reply] = {}
        self._outbox: list[RequestOutput] = []

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> RequestOutput | None:
        """Queue a request. A refusal comes back as a finished output with its error."""
        try:
            self.scheduler.add(request)
        except HyradixError as error:
            return refusal_of(request, error)
        self._replies[request.request_id] = _Reply(OutputStream(self._tokenizer, request.sampling))
        return None

    def abort(self, request_id: str) -> None:
        """End a request; its last output comes from the next ``step``. Unknown ids are ignored."""
        progress = self.scheduler.abort(request_id)
        if progress is not None:
            self._outbox.append(self._render(progress))

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._outbox) or self.scheduler.has_work

    # ---- the loop -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it brought (and what aborts left behind).

        With overlap the newest step stays in flight while the one before it is committed.
        """
        times = self.times
        times.begin()
        outputs, self._outbox = self._outbox, []
        batch = self.scheduler.schedule()
        times.end("schedule")
        if batch is not None:
            self.runner.submit(batch)
            times.end("submit")
        may_run_on = 1 if self._config.overlap and batch is not None else 0
        if self.scheduler.num_in_flight > may_run_on:
            step = self.runner.collect()
            times.end("wait")
            news = self.scheduler.commit(step)
            outputs += [self._render(item) for item in news]
        if self._config.check_invariants:
            check(self.scheduler.cache)
        times.end("commit")
        self.scheduler.note_time(times.total_s)
        return outputs

    # ---- text -----------------------------------------------------------------------------------

    def feed(
        self, state: RequestState, token_ids: list[int], reason: FinishReason | None
    ) -> int | None:
        """Detokenise committed tokens and look for stop strings (``scheduler.TokenSink``)."""
        reply = self._replies[state.request.request_id]
        step = reply.stream.feed(token_ids, is_ended_by_last=reason is FinishReason.STOP)
        reply.text += step.text
        reply.stop_string = step.stop_string
        return step.num_kept_tokens

    def _render(self, news: Progress) -> RequestOutput:
        state = news.state
        reply = self._replies[state.request.request_id]
        num_output_tokens = state.num_output_tokens
        if news.prompt_logprobs is not None and num_output_tokens <= len(news.token_ids):
            if news.prompt_logprobs.start == 1:
                reply.prompt_logprobs.clear()
            reply.prompt_logprobs.append(news.prompt_logprobs)
        output = RequestOutput(
            request_id=state.request.request_id,
            token_ids=news.token_ids,
            logprobs=self._logprobs(news) if news.logprobs is not None else None,
            finish_reason=state.finish_reason,
            num_prompt_tokens=state.num_prompt_tokens,
            num_cached_tokens=state.num_cached_tokens,
            num_kv_tokens=state.num_kv_tokens,
            num_output_tokens=num_output_tokens,
            miss_reason=state.miss_reason,
        )
        is_first = bool(news.token_ids) and num_output_tokens == len(news.token_ids)
        if is_first and state.request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = self._prompt_logprobs(state, reply)
        if state.finish_reason is not None:
            self._finish(output, state, reply)
        output.text = reply.take_text()
        return output

    def _finish(self, output: RequestOutput, state: RequestState, reply: _Reply) -> None:
        output.stop_reason = state.stop_reason
        if reply.stop_string is None:
            reply.text += reply.stream.finish()
        else:
            output.stop_reason = reply.stop_string
        if state.finish_reason is FinishReason.ERROR:
            error = RequestFailedError("the model produced logits that are not finite")
            output.error, output.error_code = error.message, error.code
            output.error_status = error.status
        del self._replies[state.request_id]

    def _logprobs(self, news: Progress) -> list[TokenLogprob] | None:
        if news.logprobs is None:
            return None
        return self._spell(news.logprobs)[: len(news.token_ids)]

    def _prompt_logprobs(self, state: RequestState, reply: _Reply) -> list[TokenLogprob | None]:
        """Whole, entry 0 None; positions never computed cannot occur (nothing was cached)."""
        result: list[TokenLogprob | None] = [None]
        for part in reply.prompt_logprobs:
            assert part.start == len(result)
            result += self._spell(part.logprobs)
        reply.prompt_logprobs.clear()
        return result

    def _spell(self, values: TokenLogprobs) -> list[TokenLogprob]:
        """Arrays to wire form, with the text of every token named."""
        text = self._tokenizer.token_text
        return [
            TokenLogprob(
                int(token),
                float(values.logprobs[i]),
                int(values.ranks[i]),
                text(int(token)),
                [
                    (int(t), float(lp), text(int(t)))
                    for t, lp in zip(values.top_ids[i], values.top_logprobs[i], strict=True)
                ],
            )
            for i, token in enumerate(values.token_ids)
        ]

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        return collect_stats(self.scheduler)

    def cache_view(self) -> CacheView:
        """The radix tree and the pools now."""
        return view_cache(self.scheduler.cache)

    def flush_cache(self) -> bool:
        """Forget every unpinned prefix; refused (False) while requests run or wait.

        A request whose reply is complete is waited for: it may still be in flight, or be folded.
        """
        while self.scheduler.is_only_settling:
            self._outbox = self.step()
        if self.scheduler.has_work:
            return False
        self.scheduler.cache.flush()
        return True

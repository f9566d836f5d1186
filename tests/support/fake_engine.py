"""An engine without a model: it recites a sentence, one byte per step, rotated by the seed.

Prompts that contain these words do something else: CRASH (step() raises), FAULT (the third token
fails), REFUSE (add() refuses), BUG (add() raises something unexpected), UNICODE (recites
characters of several bytes).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from hyradix.config import Settings
from hyradix.engine.messages import (
    CacheView,
    EngineInfo,
    EngineStats,
    NamespaceView,
    NodeView,
    PoolStats,
    RequestOutput,
    TokenLogprob,
    refusal_of,
)
from hyradix.engine.process import ProgressCallback
from hyradix.errors import ConfigError, QueueFullError, RequestFailedError
from hyradix.request import FinishReason, MissReason, Request
from tests.support.fake_text import EOS, VOCAB_SIZE

SENTENCE = b"The quick brown fox jumps over the lazy dog. "
NATURAL_END = 4 * len(SENTENCE)


@dataclass
class _Running:
    request: Request
    text: bytes
    cached: int
    num_output: int = 0
    pending: bytes = b""
    said: str = ""
    started: bool = False


@dataclass
class FakeEngine:
    """See the module's docstring. ``delay_s`` is how long a step takes."""

    info: EngineInfo
    delay_s: float = 0.0
    max_queue: int = 1024
    running: dict[str, _Running] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    _news: deque[RequestOutput] = field(default_factory=deque)
    num_steps: int = 0
    num_output_tokens: int = 0
    num_computed: int = 0
    num_cached: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request) -> RequestOutput | None:
        prompt = bytes(request.prompt_array().astype("u1").tobytes())
        if b"BUG" in prompt:
            raise KeyError("a bug in add()")
        if b"REFUSE" in prompt or len(self.running) >= self.max_queue:
            return refusal_of(request, QueueFullError("too many requests wait"))
        self.requests.append(request)
        start = request.seed % len(SENTENCE)
        text = (
            (SENTENCE[start:] + SENTENCE[:start]) if b"UNICODE" not in prompt else "äöü€".encode()
        )
        key = request.prompt_token_ids + request.namespace.salt.encode()
        cached = request.num_prompt_tokens - 1 if key in self.seen else 0
        self.seen.add(key)
        self.running[request.request_id] = _Running(request, text, cached)
        return None

    def abort(self, request_id: str) -> None:
        running = self.running.pop(request_id, None)
        if running is not None:
            self.aborted.append(request_id)
            self._finish(RequestOutput(request_id=request_id), FinishReason.ABORT, None)

    def has_work(self) -> bool:
        return bool(self.running or self._news)

    def step(self) -> list[RequestOutput]:
        if self.running:
            time.sleep(self.delay_s)
        self.num_steps += 1
        for running in list(self.running.values()):
            self._advance(running)
        outputs = list(self._news)
        self._news.clear()
        return outputs

    def cache_view(self) -> CacheView:
        pool = PoolStats(free=90, cached=10, held=0, total=100)
        node = NodeView(
            id=2,
            parent=None,
            depth=10,
            num_tokens=10,
            has_state=True,
            kv_lock=0,
            state_lock=0,
            last_use=7,
        )
        return CacheView(
            namespaces=[NamespaceView(id=("", "salt"), nodes=[node])],
            pools={"kv": pool, "state": pool},
        )

    def flush_cache(self) -> bool:
        return not self.has_work()

    def stats(self) -> EngineStats:
        pool = PoolStats(free=90, cached=10, held=0, total=100)
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv=pool,
            state=pool,
            num_steps=self.num_steps,
            num_output_tokens=self.num_output_tokens,
            num_computed_tokens=self.num_computed,
            num_cached_tokens=self.num_cached,
            num_requests=len(self.requests),
            miss_reasons={"cold": 1},
            finish_reasons=dict(self.finish_reasons),
        )

    def _advance(self, running: _Running) -> None:
        request, sampling = running.request, running.request.sampling
        prompt = request.prompt_array().astype("u1").tobytes()
        if b"CRASH" in prompt:
            raise RuntimeError("the step failed")
        if b"FAULT" in prompt and running.num_output == 2:
            del self.running[request.request_id]
            self._news.append(refusal_of(request, RequestFailedError("non-finite logits")))
            return
        ends = running.num_output == NATURAL_END and not sampling.ignore_eos
        token = EOS if ends else running.text[running.num_output % len(running.text)]
        running.num_output += 1
        self.num_output_tokens += 1
        output = self._output(running, token)
        stop = next((s for s in sampling.stop_strings if s in running.said), None)
        if stop is not None:
            output.text = output.text if sampling.include_stop_str_in_output else ""
            self._finish(output, FinishReason.STOP, stop)
        elif token == EOS or token in (sampling.stop_token_ids or ()):
            self._finish(output, FinishReason.STOP, None if token == EOS else token)
        elif running.num_output == sampling.max_tokens:
            self._finish(output, FinishReason.LENGTH, None)
        else:
            self._news.append(output)
            return
        del self.running[request.request_id]

    def _output(self, running: _Running, token: int) -> RequestOutput:
        request, sampling = running.request, running.request.sampling
        text = "" if token == EOS else self._decode(running, token)
        running.said += text
        output = RequestOutput(
            request_id=request.request_id,
            token_ids=[token],
            text=text,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=running.cached,
            num_kv_tokens=running.cached,
            num_output_tokens=running.num_output,
            miss_reason=MissReason.NONE if running.cached else MissReason.COLD,
        )
        if sampling.logprobs is not None:
            output.logprobs = [_logprob(token, sampling.logprobs)]
        if sampling.prompt_logprobs is not None and not running.started:
            ids = request.prompt_array().tolist()
            count = sampling.prompt_logprobs
            output.prompt_logprobs = [None, *(_logprob(i, count) for i in ids[1:])]
        if not running.started:
            self.num_computed += request.num_prompt_tokens - running.cached
            self.num_cached += running.cached
        running.started = True
        return output

    def _decode(self, running: _Running, token: int) -> str:
        running.pending += bytes([token])
        try:
            text = running.pending.decode()
        except UnicodeDecodeError:
            return ""
        running.pending = b""
        return text

    def _finish(
        self, output: RequestOutput, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        output.finish_reason, output.stop_reason = reason, stop_reason
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
        self._news.append(output)


def _logprob(token: int, count: int) -> TokenLogprob:
    """The token itself is the likeliest, the next ids follow."""
    top = [(token + k, -0.5 - k, chr((token + k) % 256)) for k in range(count)]
    return TokenLogprob(token_id=token, logprob=-0.5, rank=1, text=chr(token % 256), top=top)


def make_info(settings: Settings) -> EngineInfo:
    return EngineInfo(
        model_name=settings.served_model_name or settings.model,
        model_dir="/models/fake-dir",
        architecture="FakeForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_context=settings.max_context or 8192,
        max_requests=32,
        num_kv_slots=100,
        num_states=100,
        kv_pool_bytes=101 << 10,
        state_pool_bytes=101 << 20,
        weight_bytes=0,
        dtype="float32",
        device="cpu",
    )


def build(settings: Settings, on_progress: ProgressCallback) -> FakeEngine:
    for done in range(3):
        on_progress("weights", done, 2)
    return FakeEngine(make_info(settings), max_queue=settings.max_queue)


def build_slow(settings: Settings, on_progress: ProgressCallback) -> FakeEngine:
    engine = build(settings, on_progress)
    engine.delay_s = 0.02
    return engine


def build_hanging(settings: Settings, on_progress: ProgressCallback) -> FakeEngine:
    on_progress("weights", 0, 2)
    time.sleep(60)
    raise AssertionError


def build_refusing(settings: Settings, on_progress: ProgressCallback) -> FakeEngine:
    raise ConfigError("--states 1 is less than --max-requests 2")


def build_broken(settings: Settings, on_progress: ProgressCallback) -> FakeEngine:
    raise ZeroDivisionError("a bug at start-up")

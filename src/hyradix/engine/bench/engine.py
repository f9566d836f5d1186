"""``hyradix bench engine``: the real engine, in this process, over prompts of random token ids.

Every round runs every case once, so that a noisy machine moves all of them; figures are medians of
rounds. A prompt is never sent twice, but for the beginning that a cached prompt shares.

A decode step counts when it and the step before brought a token for every request of the batch:
none is prefilled then, and the time between is that of the step. Its parts are those of the loop
(``step_times.py``); on the CPU the model runs within ``submit`` (without overlap), on a GPU it is
waited for, and ``device`` is the time between two events around the launch.

Owns: the cases and how they are timed. Does not know: floors, reports.
Read next: ``commands.py`` (the report), ``engine.py`` of the package (what is timed).
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hyradix.config import Settings
from hyradix.engine.bench.start import Stages
from hyradix.engine.build import build_engine
from hyradix.engine.engine import Engine
from hyradix.engine.messages import RequestOutput
from hyradix.engine.step_times import PARTS, Part
from hyradix.errors import ConfigError
from hyradix.request import Boundary, BoundaryKind, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """prefill: (prompts, tokens of each). cached: (tokens of a prompt, of those cached).

    decode_logs: an engine for each; none: one, with what the device decides.
    """

    batches: tuple[int, ...]
    prompt: int
    output: int
    decode_logs: tuple[int, ...] = ()
    prefill: tuple[int, int] | None = None
    cached: tuple[int, int] | None = None
    repeats: int = 3

    def check(self) -> None:
        """Raise ``ConfigError`` for what cannot be measured."""
        if self.cached is not None and not 0 < self.cached[1] < self.cached[0]:
            raise ConfigError(
                f"--cached {self.cached[0]}:{self.cached[1]}: the cached beginning must be shorter "
                "than the prompt",
                param="cached",
            )
        if not (self.batches or self.prefill or self.cached):
            raise ConfigError("nothing is asked for: --batch, --prefill or --cached", param="batch")

    def pools(self, settings: Settings) -> Settings:
        """Settings with room for every case, where they leave that open."""
        rows = max([*self.batches, 1 if self.prefill is None else self.prefill[0]])
        lengths = [(n, self.prompt + self.output) for n in self.batches]
        lengths += [(n, length + 1) for n, length in filter(None, [self.prefill])]
        lengths += [(2, total + 1) for total, _ in filter(None, [self.cached])]
        most = max(n * length for n, length in lengths)
        return replace(
            settings,
            max_requests=settings.max_requests or rows,
            max_context=settings.max_context or max(length for _, length in lengths) + 1,
            kv_slots=settings.kv_slots or most + most // 4 + 64,
            states=settings.states or rows + rows // 2 + 16,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop. requests: that got a token. ended: clock. device_ms: None on a CPU."""

    seconds: float
    parts: dict[Part, float]
    requests: int
    tokens: int
    ended: float
    device_ms: float | None = None


class DeviceClock:
    """Events around what ``submit`` launches, on the runner's stream.

    The first passes when the step before has run, or at once where nothing is left to run: a wait
    for the host is part of what is measured.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._begin: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, part: Part) -> None:
        """See ``StepTimes.observer``."""
        if part == "schedule":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record(self._stream)
        elif part == "submit" and self._begin is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record(self._stream)
            self._events.append((self._begin, end))

    def take(self) -> list[float]:
        """Milliseconds of the submits since the last call, in order."""
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [float(begin.elapsed_time(end)) for begin, end in events]


class Driver:
    """One engine, and prompts that nobody has sent before."""

    def __init__(self, settings: Settings, *, seed: int = 0) -> None:
        stages = Stages()
        self.engine: Engine = build_engine(settings, stages.update)
        stages.finish()
        gc.collect()
        gc.freeze()  # as the process of a server does
        self.start = stages.as_json()
        self._rng = np.random.default_rng(seed)
        self._count = itertools.count()
        self._device_clock: DeviceClock | None = None
        if self.engine.info.device == "cuda":
            stream = getattr(self.engine.runner, "stream", None)  # with drafts: the default one
            self._device_clock = self.engine.times.observer = DeviceClock(stream)

    def ids(self, count: int) -> np.ndarray:
        """Random token ids."""
        return self._rng.integers(0, self.engine.info.vocab_size, count, dtype=np.int32)

    def run(
        self, prompts: list[np.ndarray], max_tokens: int, boundaries: tuple[Boundary, ...] = ()
    ) -> Run:
        """Send all at once and run until all have ended. Raises ``ConfigError`` for a refusal."""
        engine, clock = self.engine, time.perf_counter
        started = clock()
        for prompt in prompts:
            refusal = engine.add(self.request(prompt, max_tokens, boundaries))
            if refusal is not None:
                raise ConfigError(f"a request of the bench was refused: {refusal.error}")
        steps: list[Step] = []
        outputs: list[RequestOutput] = []
        before = started
        while engine.has_work():
            news = engine.step()
            now = clock()
            brought = [output for output in news if output.token_ids]
            tokens = sum(len(output.token_ids) for output in brought)
            parts = dict(engine.times.seconds)
            steps.append(Step(now - before, parts, len(brought), tokens, now - started))
            outputs += [output for output in news if output.is_finished]
            before = now
        if self._device_clock is not None:
            times = self._device_clock.take()
            submitted = [i for i, step in enumerate(steps) if "submit" in step.parts]
            for i, milliseconds in zip(submitted, times, strict=True):
                steps[i] = replace(steps[i], device_ms=milliseconds)
        failed = [output.error for output in outputs if output.error]
        if failed or len(outputs) != len(prompts):
            raise ConfigError(f"requests of the bench failed: {failed[:1]}")
        return Run(steps, outputs)

    def request(
        self, prompt: np.ndarray, max_tokens: int, boundaries: tuple[Boundary, ...]
    ) -> Request:
        """Greedy, to its full length."""
        return Request(
            request_id=f"bench-{next(self._count)}",
            prompt_token_ids=prompt.astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            seed=0,
            boundaries=boundaries,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What happened to prompts that were sent together."""

    steps: list[Step]
    outputs: list[RequestOutput]

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended

    @property
    def first_token_s(self) -> float:
        """Until the last of them had its first token, when each gets one only."""
        return next(step.ended for step in reversed(self.steps) if step.requests)

    def full_steps(self, batch: int) -> list[Step]:
        """Steps that decoded the whole batch and nothing else."""
        pairs = itertools.pairwise(self.steps)
        return [b for a, b in pairs if a.requests == b.requests == batch]


def decode_case(driver: Driver, options: EngineBenchOptions, batch: int) -> dict[str, Any]:
    """One round of decoding; milliseconds are means over its full steps (folds are among them)."""
    run = driver.run([driver.ids(options.prompt) for _ in range(batch)], options.output)
    steps = run.full_steps(batch)
    if not steps:
        raise ConfigError(
            f"--output {options.output} ends before all {batch} prompts are prefilled: nothing is "
            "left to time",
            param="output",
        )
    seconds = sum(step.seconds for step in steps)
    mean = 1e3 / len(steps)
    parts = {p: mean * sum(step.parts.get(p, 0.0) for step in steps) for p in PARTS}
    on_device = [step.device_ms for step in steps if step.device_ms is not None]
    return {
        "ms_per_step": mean * seconds,
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "steps": len(steps),
        "device_ms": statistics.fmean(on_device) if on_device else None,
        "whole_tokens_per_s": batch * options.output / run.seconds,
        **{f"{part}_ms": value for part, value in parts.items()},
        "other_ms": mean * seconds - sum(parts.values()),
    }


def prefill_case(driver: Driver, prompts: int, length: int) -> dict[str, Any]:
    """One round of prefilling."""
    run = driver.run([driver.ids(length) for _ in range(prompts)], 1)
    seconds = run.first_token_s
    return {"tokens_per_s": prompts * length / seconds, "seconds": seconds}


def cached_case(driver: Driver, total: int, cached: int) -> dict[str, Any]:
    """A prompt of which nothing is known, then one that shares its beginning, which is marked."""
    beginning = driver.ids(cached)
    marks = (Boundary(cached, BoundaryKind.MARK),)
    cold, warm = (
        driver.run([np.concatenate([beginning, driver.ids(total - cached)])], 1, marks)
        for _ in range(2)
    )
    return {
        "cold_ms": cold.first_token_s * 1e3,
        "cached_ms": warm.first_token_s * 1e3,
        "ratio": cold.first_token_s / warm.first_token_s,
        "cached_tokens": warm.outputs[0].num_cached_tokens,
    }


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every figure over the rounds; None where it was not measured."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        values = [figures[name] for figures in rounds if figures[name] is not None]
        found[name] = float(f"{statistics.median(values):.5g}") if values else None
    return found


def measure(
    drivers: dict[int | None, Driver],
    options: EngineBenchOptions,
    on_round: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Rounds of every case by its name, the first (warm-up) round left out."""
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for log, driver in drivers.items():
        for batch in options.batches:
            cases[f"decode {batch} {log}"] = lambda d=driver, n=batch: decode_case(d, options, n)  # type: ignore[misc]
    first = next(iter(drivers.values()))
    if options.prefill is not None:
        prompts, length = options.prefill
        cases["prefill"] = lambda: prefill_case(first, prompts, length)
    if options.cached is not None:
        total, cached = options.cached
        cases["cached"] = lambda: cached_case(first, total, cached)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for number in range(options.repeats + 1):
        on_round(number, options.repeats + 1)
        for name, run in cases.items():
            figures = run()
            if number:
                rounds[name].append(figures)
    on_round(options.repeats + 1, options.repeats + 1)
    return rounds

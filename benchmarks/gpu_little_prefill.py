"""Steps of little prefill, alone and beside decodes: by graphs, and as one mixed forward.

    PYTHONPATH=src python benchmarks/gpu_little_prefill.py

Behind a cached prefix of ``PREFIX`` tokens, in turns, medians in milliseconds: from a request's
arrival to its first token; and how much longer four steps of so many running decodes take with the
request than without.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from hyradix.config import Settings  # noqa: E402
from hyradix.engine.bench.engine import Driver, EngineBenchOptions  # noqa: E402
from hyradix.request import Boundary, BoundaryKind  # noqa: E402
from hyradix.runner.device_prefill import PaddedPrefill  # noqa: E402

PREFIX = 4_900
ALONE = (20, 100, 200, 330, 450, 520, 700, 780, 900, 1_000)
BESIDE = (50, 200, 500, 1_000)
ROWS = (16, 100, 220)
ROUNDS = 7
STEPS = 4
WAYS = ("graphs", "mixed")
SETTLING = 60
"""Steps until all decode."""
OUTPUT = SETTLING + ROUNDS * len(WAYS) * 2 * STEPS + 20
"""Tokens of a decode: it must outlast what is measured beside it."""


class Bench:
    """One engine of the 4b shape, whose prefix is cached."""

    def __init__(self) -> None:
        options = EngineBenchOptions(
            batches=(max(ROWS) + 1,), prompt=1_024, output=OUTPUT, cached=(6_000, PREFIX)
        )
        shape = ROOT / "benchmarks/configs/shape-4b.json"
        settings = Settings(random_weights=str(shape), device="cuda", dtype="bfloat16")
        self.driver = Driver(options.pools(settings))
        self.prefix = self.driver.ids(PREFIX)
        self.marks = (Boundary(PREFIX, BoundaryKind.MARK),)
        for _ in range(2):
            self.alone(50, "graphs")

    def prompt(self, num_tokens: int) -> np.ndarray:
        """The prefix and new tokens."""
        return np.concatenate([self.prefix, self.driver.ids(num_tokens)])

    def alone(self, num_tokens: int, way: str) -> float:
        """Milliseconds until the first token."""
        prompt = self.prompt(num_tokens)
        with forced(way):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.driver.run([prompt], 1, self.marks)
            return 1e3 * (time.perf_counter() - started)

    def start_decodes(self, count: int) -> None:
        """So many that go on for long."""
        engine = self.driver.engine
        for _ in range(count):
            refusal = engine.add(self.driver.request(self.driver.ids(1_024), OUTPUT, ()))
            assert refusal is None, refusal
        for _ in range(SETTLING):
            engine.step()

    def beside(self, num_tokens: int, way: str) -> tuple[float, float]:
        """Milliseconds of a plain step, and more for a prompt."""
        plain = self._steps()
        prompt = self.prompt(num_tokens)
        with forced(way):
            assert self.driver.engine.add(self.driver.request(prompt, 1, self.marks)) is None
            return plain / STEPS, self._steps() - plain

    def _steps(self) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            self.driver.engine.step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def finish(self) -> None:
        """Until nobody runs."""
        while self.driver.engine.has_work():
            self.driver.engine.step()


def forced(way: str) -> AbstractContextManager[object]:
    """Inside, nothing is padded where ``way`` is mixed."""
    if way == "mixed":
        return mock.patch.object(PaddedPrefill, "lay_out", return_value=None)
    return nullcontext()


def main() -> None:
    started = time.perf_counter()
    sum(range(10_000_000))
    host = time.perf_counter() - started
    print(f"host: sum(range(1e7)) in {host:.3f} s, load {os.getloadavg()[0]:.1f}")
    bench = Bench()
    for num_tokens in ALONE:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                found[way].append(bench.alone(num_tokens, way))
        print(f"{num_tokens:5} tokens alone:", _medians(found))
    for rows in ROWS:
        for num_tokens in BESIDE:
            bench.start_decodes(rows)
            more: dict[str, list[float]] = {way: [] for way in WAYS}
            plain = []
            for _ in range(ROUNDS):
                for way in WAYS:
                    step, with_prompt = bench.beside(num_tokens, way)
                    plain.append(step)
                    more[way].append(with_prompt)
            step = statistics.median(plain)
            print(f"{num_tokens:5} tokens beside {rows} decodes of {step:.2f}:", _medians(more))
            bench.finish()


def _medians(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{way} {statistics.median(times):.2f}" for way, times in found.items())


if __name__ == "__main__":
    main()

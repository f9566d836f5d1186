"""What a kernel's check and timing are, and how the time of a call is taken.

Owns: ``Check``, ``Checks``, ``Bench``, ``Section``, ``time_bench``. Does not know: kernels.

A bench builds several input sets and calls one after the other, so that together they are several
times the last cache. On a GPU a CUDA graph of all of them is replayed, so launch gaps are those of
serving. A time is the median of all rounds divided by the calls in one.
Read next: ``kernels.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]
BATCHES = (1, 8, 64, 256)
TUNED = (1, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 256 << 20
_BENCH_S = 0.05
_MIN_ROUNDS, _MAX_ROUNDS = 5, 100


@dataclass(frozen=True)
class Check:
    """Norm of the error over the norm of a float64 reference; inf where something is not finite."""

    name: str
    error: float
    limit: float

    @property
    def is_ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Checks:
    """Some that share what they are computed from. Nothing is computed before ``run``, and nothing
    that other groups did is needed: any process can run any group."""

    name: str
    run: Callable[[], Iterable[Check]]


@dataclass(frozen=True)
class Bench:
    """One call moves ``num_bytes`` at least; ``build(n)`` makes n calls on inputs of their own."""

    name: str
    batch: int
    num_bytes: int
    build: Callable[[int], list[Call]]
    flops: int = 0
    note: str = ""
    config: object = None
    """A candidate of the static table, where tables are tuned; None: what the table says."""

    @property
    def num_sets(self) -> int:
        return max(1, min(48, -(-_COLD_BYTES // max(self.num_bytes, 1))))


class Section(Protocol):
    """Kernels that belong together: a module of ``benchmarks/gpu``, or an object."""

    def checks(self, device: torch.device) -> Iterator[Checks]:
        """Every kernel against float64, on odd sizes; what takes longest comes first."""

    def benches(self, device: torch.device, *, tune: bool) -> Iterator[Bench]:
        """What is timed; ``tune``: candidates of the static tables too."""


def time_bench(bench: Bench, device: torch.device | None = None) -> float:
    """Seconds a call. Leaves no memory allocated. device: a GPU, unless told."""
    if device is not None and device.type == "cpu":
        return _time_on_cpu(bench)
    calls = bench.build(bench.num_sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return _median(lambda: _replay(graph)) / len(calls)


def _time_on_cpu(bench: Bench) -> float:
    calls = bench.build(min(bench.num_sets, 8))

    def run() -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - started

    run()
    return _median(run) / len(calls)


def _median(run: Callable[[], float]) -> float:
    first = run()
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_BENCH_S / first)))
    return statistics.median([run() for _ in range(rounds)])


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3

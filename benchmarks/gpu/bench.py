"""What a kernel's check and timing are, and how device time is taken.

Owns: ``Check``, ``Bench``, ``time_bench``. Does not know: kernels.

A bench builds several input sets and calls one after the other, so that together they are several
times the second-level cache; a CUDA graph of all of them is replayed, so launch gaps are those of
serving. A time is the median replay divided by the calls in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]
BANDWIDTH = 4.28e12
"""Copy on one H200, bytes read and written a second (PERFORMANCE.md, section 4)."""
BATCHES = (1, 8, 64, 256)
TUNED = (1, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 256 << 20
_BENCH_S = 0.05


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
class Bench:
    """One call moves ``num_bytes`` at least; ``build(n)`` makes n calls on inputs of their own."""

    name: str
    batch: int
    num_bytes: int
    build: Callable[[int], list[Call]]
    flops: int = 0
    note: str = ""
    config: object = None
    """A candidate of ``--tune``; None: what the table says."""

    @property
    def num_sets(self) -> int:
        return max(1, min(48, -(-_COLD_BYTES // max(self.num_bytes, 1))))


def time_bench(bench: Bench) -> float:
    """Seconds a call. Leaves no memory allocated."""
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
    first = _replay(graph)
    times = [_replay(graph) for _ in range(max(5, min(100, int(_BENCH_S / first))))]
    return statistics.median(times) / len(calls)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3

"""Decode steps of padded sizes, replayed as CUDA graphs; on the CPU they are simply called.

Owns: capturing, which size serves how many rows.
Does not know: what a step computes: it is a function of a size over memory that stays in place.

Invariants:
- A captured function allocates only from the graphs' own pool, waits for nothing, and reads every
  number that changes from static memory.
- Graphs share one pool of memory, since no two run at once; the largest is captured first, so that
  the others fit into what it leaves.
- Each size has run once before it is captured: its kernels are compiled by then.
- Nothing is collected while a graph is captured: to free what another engine left (its graphs, its
  events) is a call that a capture does not survive.
Read next: ``device_bytes.py`` (the ladder of sizes), ``decode_form.py`` (the static memory).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Run = Callable[[int], None]
OnProgress = Callable[[int, int], None]


class Graphs:
    """``run(size)`` for each of ``sizes``, captured where the device is a GPU."""

    def __init__(self, device: torch.device, sizes: tuple[int, ...], run: Run) -> None:
        self._device = device
        self._sizes = sizes
        self._run = run
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds so many rows; None: there is none."""
        at = bisect_left(self._sizes, num_rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def rehearse(self) -> None:
        """Run every size once. The static memory must hold padding alone."""
        for size in reversed(self._sizes):
            self._run(size)

    def capture(self, on_progress: OnProgress) -> None:
        """Run every size once, then capture it. The static memory must hold padding alone."""
        pool = None
        if self._device.type == "cuda":
            gc.collect()
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done, len(self._sizes))
            self._run(size)
            if self._device.type != "cuda":
                continue
            torch.cuda.current_stream(self._device).synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle() if pool is None else pool
            with (
                uncollected(),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                self._run(size)
            self._captured[size] = graph
        on_progress(len(self._sizes), len(self._sizes))

    def replay(self, size: int) -> None:
        """Run a size on what the static memory holds now."""
        graph = self._captured.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection of cyclic garbage inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Steps of padded sizes, replayed as CUDA graphs; on the CPU they are simply called.

Owns: capturing, which size serves how many rows or tokens.
Does not know: what a step computes: it is a function of a size over memory that stays in place.

Invariants:
- A captured function allocates only from the graphs' own pool, waits for nothing, and reads every
  number that changes from static memory.
- Graphs of all kinds share one pool of memory, since no two run at once; the kind with the largest
  size is captured first, its largest first, so that the others fit into what it leaves.
- Each size has run once before it is captured: its kernels are compiled by then.
- Nothing is collected while a graph is captured: to free what another engine left (its graphs, its
  events) is a call that a capture does not survive.
Read next: ``device_bytes.py`` (the ladders of sizes), ``decode_form.py`` and ``prefill_form.py``
(the static memory).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[int], None]
"""Of a size."""
OnProgress = Callable[[int, int], None]


class Graphs:
    """``run(size)`` for each of ``sizes``, ascending, captured where the device is a GPU.

    clear: fills the static memory with padding alone, for a run of the size.
    """

    def __init__(self, device: torch.device, sizes: tuple[int, ...], run: Run, clear: Run) -> None:
        self.device = device
        self.sizes = sizes
        self._run = run
        self._clear = clear
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, count: int) -> int | None:
        """The smallest size that holds so many; None: there is none."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def rehearse(self) -> None:
        """Run every size once, on padding alone."""
        for size in reversed(self.sizes):
            self._clear(size)
            self._run(size)

    def capture(self, size: int, pool: Any) -> None:
        """Run a size once, then capture it into ``pool``, on padding alone."""
        self._clear(size)
        self._run(size)
        if self.device.type != "cuda":
            return
        torch.cuda.current_stream(self.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._run(size)
        self._captured[size] = graph

    def replay(self, size: int) -> None:
        """Run a size on what the static memory holds now."""
        graph = self._captured.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()


def capture_all(kinds: Sequence[Graphs], on_progress: OnProgress) -> None:
    """Capture every size of every kind."""
    kinds = sorted(kinds, key=lambda kind: -max(kind.sizes, default=0))
    jobs = [(kind, size) for kind in kinds for size in reversed(kind.sizes)]
    pool = None
    if jobs and kinds[0].device.type == "cuda":
        gc.collect()
        pool = torch.cuda.graph_pool_handle()
    for done, (kind, size) in enumerate(jobs):
        on_progress(done, len(jobs))
        kind.capture(size, pool)
    on_progress(len(jobs), len(jobs))


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

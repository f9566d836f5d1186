"""Steps on a thread of their own, so that the next one is scheduled while one runs.

Owns: one worker thread. Does not know: models, batches.
Invariants: steps run one after another, in the order they were submitted; an exception of a step
is raised where its output is collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hyradix.request import ScheduledBatch, StepOutput


class BackgroundRunner:
    """Implements ``hyradix.request.Runner`` over a function that runs one step."""

    def __init__(self, execute: Callable[[ScheduledBatch], StepOutput]) -> None:
        self._execute = execute
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hyradix-step")
        self._steps: deque[Future[StepOutput]] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        """Start a step; returns at once."""
        self._steps.append(self._worker.submit(self._execute, batch))

    def collect(self) -> StepOutput:
        """Wait for the oldest submitted step."""
        return self._steps.popleft().result()

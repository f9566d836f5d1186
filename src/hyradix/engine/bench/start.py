"""How long it takes until the first request can run, by the stages that are reported.

Owns: ``Stages``. Does not know: what a stage does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class Stages:
    """Listens to a start-up's progress. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: list[tuple[str, float]] = [("config", clock())]
        self._ready: float | None = None

    def update(self, stage: str, done: int, total: int) -> None:
        """A ``Progress`` callback: a stage lasts until the next one is first heard of."""
        if stage != self._begun[-1][0]:
            self._begun.append((stage, self._clock()))

    def finish(self) -> None:
        """The first request could run now."""
        self._ready = self._clock()

    def as_json(self) -> dict[str, object]:
        """Seconds of each stage and of all."""
        assert self._ready is not None
        ends = [begun for _, begun in self._begun[1:]] + [self._ready]
        stages: dict[str, float] = {}
        for (name, begun), end in zip(self._begun, ends, strict=True):
            stages[name] = round(stages.get(name, 0.0) + end - begun, 3)
        return {"stages_s": stages, "ready_s": round(self._ready - self._begun[0][1], 3)}


def process_age_s() -> float | None:
    """Seconds since this process began, imports included; None where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(uptime - ticks / os.sysconf("SC_CLK_TCK"), 2)

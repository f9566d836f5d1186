"""What the parts of a step take: schedule, submit, wait, commit (checks and text included).

Owns: the clock of one step. Does not know: what happens in a part.
Cost: a call of the clock for each part, under a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Part = Literal["schedule", "submit", "wait", "commit"]
PARTS: tuple[Part, ...] = ("schedule", "submit", "wait", "commit")


class StepTimes:
    """Seconds of the step that began last; a part that did not happen has none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[Part, float] = {}
        self.observer: Callable[[Part], None] | None = None
        """Told of every end of a part: so that a bench can mark the same moments on a device."""
        self._clock = clock
        self._last = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.seconds.clear()
        self._last = self._clock()

    def end(self, part: Part) -> None:
        """What went on since the end before was ``part``."""
        now = self._clock()
        self.seconds[part] = now - self._last
        self._last = now
        if self.observer is not None:
            self.observer(part)

    @property
    def total_s(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())

"""What serving has taught about drafts: how often they hold, what steps take, what may be risked.

Owns: the three measures that a choice is made from. Does not know: requests, the choice.

Invariant: drafts are tried on credit. What a round takes beyond the time in which plain decode
makes the same tokens is taken from it; it grows by a small share of all time, and by what good
rounds save, up to a bound. Without credit nothing is drafted: so whatever is believed, and however
wrongly, drafts never cost more than that share and a few steps.
Read next: ``drafting.py``, ``draft_choice.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyradix.scheduler.draft_choice import StepCosts, costs_at
from hyradix.spec_config import RoundCosts

DEFAULT_COSTS = RoundCosts(
    rows=(1, 32), plain=(1.0, 3.0), node=(0.06, 0.06), draft=(0.12, 0.36), round=(0.05, 0.15)
)
"""Where nothing was measured: in steps of one row."""
PRIOR = 0.7
"""Chance that a draft is accepted, as long as nothing is known."""
PRIOR_WEIGHT = 4.0
FORGET = 0.97
"""Weight that a measurement keeps when the next one comes."""
HOST = 1.2
"""Share of a step that the host takes beside the model, until it was measured."""
OUTLIER = 3.0
"""Steps that take longer than that many expected ones say nothing but this."""
SHARE = 0.01
"""Of the time, what may be lost on drafts that do not pay."""
START_STEPS, MOST_STEPS = 4.0, 8.0
"""Credit in plain steps: at first, and at most."""


@dataclass(slots=True)
class Rate:
    """A ratio that is measured: hits of tries, older ones counting less."""

    tries: float = PRIOR_WEIGHT
    hits: float = PRIOR_WEIGHT * PRIOR

    def add(self, hits: float, tries: float) -> None:
        """One more measurement."""
        self.hits = self.hits * FORGET + hits
        self.tries = self.tries * FORGET + tries

    @property
    def value(self) -> float:
        """The ratio now."""
        return self.hits / self.tries


@dataclass(slots=True)
class _Size:
    """Of steps of one number of rows: costs as measured at start, and two corrections.

    plainness: what a step without drafts takes, next to what was measured. slowness: what drafts
    add to a step, next to what was measured.
    """

    measured: StepCosts
    plainness: Rate
    slowness: Rate


class MeasuredCosts:
    """``RoundCosts``, corrected by every step since."""

    def __init__(self, costs: RoundCosts | None) -> None:
        self._costs = costs or DEFAULT_COSTS
        self._sizes: dict[int, _Size] = {}
        self._nearest: _Size | None = None

    def at(self, num_rows: int) -> StepCosts:
        """Seconds of the parts of a step of ``num_rows``."""
        size = self._size(num_rows)
        found, slow = size.measured, size.slowness.value
        plain = found.plain * size.plainness.value
        return StepCosts(plain, found.node * slow, found.draft * slow, found.round * slow)

    def draft_of(self, num_rows: int, num_drafting: int) -> float:
        """Seconds of a proposer's step over ``num_drafting`` ends, in steps of ``num_rows``."""
        found = costs_at(self._costs, num_rows, num_drafting=num_drafting)
        return found.draft * self._size(num_rows).slowness.value

    def note_plain(self, num_rows: int, seconds: float) -> None:
        """A step without drafts took so long."""
        size = self._nearest = self._size(num_rows)
        size.plainness.add(min(seconds / size.measured.plain, OUTLIER), 1.0)

    def note_round(self, num_rows: int, num_drafts: int, depth: int, seconds: float) -> float:
        """A step with drafts took so long. Returns ``seconds``, bounded by what is believable."""
        size = self._nearest = self._size(num_rows)
        found = size.measured
        plain = found.plain * size.plainness.value
        beside = found.round + found.draft * depth + found.node * num_drafts
        ratio = min(max((seconds - plain) / beside, 1.0 / OUTLIER), OUTLIER)
        size.slowness.add(ratio, 1.0)
        return min(seconds, OUTLIER * (plain + beside))

    def _size(self, num_rows: int) -> _Size:
        """A size that was never seen is as much slower than measured as the last one was."""
        size = self._sizes.get(num_rows)
        if size is None:
            near, weight = self._nearest, 4.0
            plainness = HOST if near is None else near.plainness.value
            slowness = 1.0 if near is None else near.slowness.value
            size = self._sizes[num_rows] = _Size(
                costs_at(self._costs, num_rows),
                Rate(weight, weight * plainness),
                Rate(weight, weight * slowness),
            )
        return size


class Credit:
    """Seconds that may be lost on drafts. See the module's docstring."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._plain = 0.0

    def of(self, plain: float) -> float:
        """What there is, in steps that take ``plain`` seconds without drafts."""
        if self._plain == 0.0:
            self._seconds = START_STEPS * plain
        self._plain = plain
        return self._seconds / plain

    def earn(self, seconds: float) -> None:
        """So much time was served."""
        self.take(-SHARE * seconds)

    def take(self, seconds: float) -> None:
        """So much was lost, or gained where negative."""
        most = MOST_STEPS * self._plain
        self._seconds = max(min(self._seconds - seconds, most), -most)

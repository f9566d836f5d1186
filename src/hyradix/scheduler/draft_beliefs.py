"""What serving has taught about drafts: what steps take, what may be risked.

Owns: these two measures. Does not know: requests, the choice.

Invariant: drafts are tried on credit. What a round takes beyond the time in which plain decode
makes the same tokens is taken from it; it grows by a small share of all time, and by what good
rounds save, up to a bound. Without credit nothing is drafted: so whatever is believed, and however
wrongly, drafts never cost more than that share and a few steps.
Read next: ``automatic_drafting.py``, ``draft_choice.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyradix.scheduler.draft_choice import StepCosts, costs_at
from hyradix.spec_config import RoundCosts

DEFAULT_COSTS = RoundCosts(
    rows=(1, 32), plain=(1.0, 3.0), node=(0.06, 0.06), draft=(0.12, 0.36), round=(0.05, 0.15)
)
"""Where nothing was measured: in steps of one row."""
FORGET_TIME = 0.93
"""Weight that a measurement of time keeps when the next one comes."""
HOST = 1.05
"""What a step takes beside the model, on the host, until it was measured."""
LEAST_SLOW = 0.1
"""Of the measured costs of a round, what is believed at least."""
FIRST_PLAIN, NEXT_PLAIN = 8, 2
"""Steps without drafts that the first number of rows begins with (a process begins slowly), and
that others begin with."""
OUTLIER = 1.5
"""A step that takes longer than that many expected ones, because of others on the machine, counts
as this: a lasting change is believed after some steps, a single one hardly moves anything."""
MUCH_LESS = 0.75
"""Of what there was, the credit below which a choice is made again at once."""
SHARE = 0.007
"""Of the time, what may be lost on drafts that do not pay, where they promise much."""
MUCH = 0.5
"""Drafts promise much where they would gain this, if they nearly always held."""
START_STEPS, MOST_STEPS = 7.0, 32.0
"""Credit in plain steps: at first where drafts promise much, and at most."""


@dataclass(slots=True)
class Rate:
    """A ratio that is measured: hits of tries, older ones counting less."""

    tries: float
    hits: float
    forget: float = FORGET_TIME

    def add(self, hits: float, tries: float) -> None:
        """One more measurement."""
        self.hits = self.hits * self.forget + hits
        self.tries = self.tries * self.forget + tries

    @property
    def value(self) -> float:
        """The ratio now."""
        return self.hits / self.tries


@dataclass(slots=True)
class _Size:
    """Of steps of one number of rows: costs as measured at start, and two corrections.

    plainness: what a step without drafts takes, next to what was measured. slowness: what drafts
    add to a step, next to what was measured and made as much slower as steps without drafts are:
    a machine that others use as well is slow at everything.
    """

    measured: StepCosts
    plainness: Rate
    slowness: Rate
    plain_due: int
    """Steps without drafts that are wanted at first, to know what they take."""
    num_rounds: int = 0
    """Rounds since the last such step."""

    @property
    def beside(self) -> float:
        """Seconds that what drafts add takes, for every second measured."""
        return self.plainness.value * self.slowness.value


class MeasuredCosts:
    """``RoundCosts``, corrected by every step since."""

    def __init__(self, costs: RoundCosts | None) -> None:
        self._costs = costs or DEFAULT_COSTS
        self._sizes: dict[int, _Size] = {}
        self._nearest: _Size | None = None

    def at(self, num_rows: int) -> StepCosts:
        """Seconds of the parts of a step of ``num_rows``."""
        size = self._size(num_rows)
        found, slow = size.measured, size.beside
        plain = found.plain * size.plainness.value
        return StepCosts(plain, found.node * slow, found.draft * slow, found.round * slow)

    def draft_of(self, num_rows: int, num_drafting: int) -> float:
        """Seconds of a proposer's step over ``num_drafting`` ends, in steps of ``num_rows``."""
        found = costs_at(self._costs, num_rows, num_drafting=num_drafting)
        return found.draft * self._size(num_rows).beside

    def note_plain(self, num_rows: int, seconds: float) -> None:
        """A step without drafts took so long."""
        size = self._nearest = self._size(num_rows)
        expected = size.measured.plain * size.plainness.value
        size.plainness.add(_believable(seconds, expected) / size.measured.plain, 1.0)
        size.plain_due, size.num_rounds = max(size.plain_due - 1, 0), 0

    def note_round(self, num_rows: int, num_drafts: int, depth: int, seconds: float) -> float:
        """A step with drafts took so long. Returns ``seconds``, bounded by what is believable."""
        size = self._nearest = self._size(num_rows)
        found = size.measured
        plain = found.plain * size.plainness.value
        beside = found.round + found.draft * depth + found.node * num_drafts
        beside *= size.plainness.value
        seconds = _believable(seconds, plain + beside * size.slowness.value)
        size.slowness.add(max((seconds - plain) / beside, LEAST_SLOW), 1.0)
        size.num_rounds += 1
        return seconds

    def wants_plain(self, num_rows: int, max_rounds: int) -> bool:
        """Whether a step without drafts is due, after so many rounds at most: they are what
        everything is compared with."""
        size = self._size(num_rows)
        return size.plain_due > 0 or size.num_rounds >= max_rounds

    def _size(self, num_rows: int) -> _Size:
        """A size that was never seen is as much slower than measured as the last one was."""
        size = self._sizes.get(num_rows)
        if size is None:
            near, weight = self._nearest, 2.0
            plainness = HOST if near is None else near.plainness.value
            slowness = 1.0 if near is None else near.slowness.value
            size = self._sizes[num_rows] = _Size(
                costs_at(self._costs, num_rows),
                Rate(weight, weight * plainness),
                Rate(weight, weight * slowness),
                FIRST_PLAIN if near is None else NEXT_PLAIN,
            )
        return size


class Credit:
    """Seconds that may be lost on drafts. See the module's docstring."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._plain = self._marked = 0.0

    def begin(self, plain: float, promise: float) -> None:
        """What there is at first; plain: seconds of a step. Later calls do nothing."""
        if self._plain == 0.0:
            self._plain, self._seconds = plain, START_STEPS * plain * promise

    def of(self, plain: float) -> float:
        """What there is, in steps that take ``plain`` seconds without drafts."""
        self._plain = plain
        return self._seconds / plain

    def mark(self) -> None:
        """``is_less`` compares with what there is now."""
        self._marked = self._seconds

    @property
    def is_less(self) -> bool:
        """Whether a large part was lost since ``mark``."""
        return self._seconds < MUCH_LESS * self._marked

    def earn(self, seconds: float) -> None:
        """So much time was served."""
        self.take(-SHARE * seconds)

    def take(self, seconds: float) -> None:
        """So much was lost, or gained where negative."""
        most = MOST_STEPS * self._plain
        self._seconds = max(min(self._seconds - seconds, most), -most)


def promise_of(most_gain: float) -> float:
    """What may be risked of what may be at most. ``most_gain``: in speed, by drafts that hold.

    The less could be gained, the less likely it is as well: it counts twice.
    """
    return min((most_gain / MUCH) ** 2, 1.0)


def _believable(seconds: float, expected: float) -> float:
    return min(max(seconds, expected / OUTLIER), expected * OUTLIER)

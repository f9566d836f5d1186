"""How often drafts hold: everybody's chance by the age of a reply and depth, and a request's own.

Owns: both measures. Does not know: costs, the choice.

Replies begin hard to foresee and become easier: with the demo model and a draft layer, a draft for
one of the first 16 tokens of a reply holds with a chance of .6 to .75, one after the 32nd with .9.
Whoever knew one chance only would learn it from beginnings, as soon as he gave replies up there,
and never again see what he gives up.
Read next: ``automatic_drafting.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hyradix.scheduler.draft_choice import Floats
from hyradix.scheduler.request_state import RequestState

AGES, NEVER = (16, 32), 1 << 30
"""Tokens of a reply at which it comes of the next age, and after the last."""
PRIOR, PRIOR_WEIGHT, OLDER = 0.6, 4.0, 1.6
"""Chance that a draft is accepted in a young reply, as long as nothing is known; drafts that it
counts as; the factor of its odds with each age. So the first drafts are tried where most hold."""
OWN_WEIGHTS = (4.0, 32.0)
"""Accepted drafts that everybody's chance counts as beside a request's own: whichever has foretold
better what was accepted. Replies of one kind differ little (the demo model's like 8 to 76 drafts),
and who believes six bad rounds gives up what would have paid; but kinds may be mixed."""
FORGET_FORETOLD, AHEAD = 0.99, 2.0
"""Weight that what was foretold keeps with every round; by how much the last weight is ahead at
first, in natural logarithms of likelihood."""
FORGET, FORGET_OWN = 0.995, 0.97
"""Weight that a measurement of acceptance, or of a request's own, keeps when the next one comes."""
FADE = 0.98
"""Weight that everybody's chances keep each time when drafts are found not to pay."""
IDLE_OWN = 0.8
"""Weight that a request's own keeps each time when it is found not to pay: nothing is for ever."""
OPTIMISM, EAGERNESS, MOST_HOPE = 0.5, 1.0, 0.98
"""Standard errors by which chances are thought better than measured, and by which on trial; the
best that is thought."""


class Acceptance:
    """Everybody's chances, ``[A, K]`` by age and depth; older measurements count less."""

    def __init__(self, num_depths: int) -> None:
        self._hits = [[0.0] * num_depths for _ in range(len(AGES) + 1)]
        self._tries = [[0.0] * num_depths for _ in range(len(AGES) + 1)]
        self._foretold = [0.0] * (len(OWN_WEIGHTS) - 1) + [AHEAD]
        self.think()

    # ---- learn ----------------------------------------------------------------------------------

    def learn(self, state: RequestState, num_accepted: int, num_judged: int) -> None:
        """Of a chain for ``state`` so many drafts were judged, the first of them accepted."""
        age = age_of(state)
        chances = self._values[age][:num_judged]
        self._foretell(state, chances, num_accepted)
        state.draft_hits = state.draft_hits * FORGET_OWN + num_accepted
        state.draft_hopes = state.draft_hopes * FORGET_OWN + sum(chances)
        hits, tries = self._hits[age], self._tries[age]
        for depth in range(num_judged):
            hits[depth] = hits[depth] * FORGET + (depth < num_accepted)
            tries[depth] = tries[depth] * FORGET + 1.0

    def _foretell(self, state: RequestState, chances: list[float], num_accepted: int) -> None:
        """Keep how likely each weight would have had what came."""
        for i, weight in enumerate(OWN_WEIGHTS):
            factor, log = _own_factor(state, weight), 0.0
            for depth, chance in enumerate(chances):
                own = min(max(chance * factor, 1.0 - MOST_HOPE), MOST_HOPE)
                log += math.log(own if depth < num_accepted else 1.0 - own)
            self._foretold[i] = self._foretold[i] * FORGET_FORETOLD + log

    def fade(self) -> None:
        """Time went by without a measurement."""
        for counts in self._hits + self._tries:
            counts[:] = [count * FADE for count in counts]

    def give_up(self, state: RequestState) -> None:
        """It was found not to pay; but nothing is for ever."""
        state.draft_hits *= IDLE_OWN
        state.draft_hopes *= IDLE_OWN

    # ---- believe --------------------------------------------------------------------------------

    def think(self) -> None:
        """Make use of all that was added.

        What is known of an age and depth is drawn to what the next younger age has at that depth,
        as far as the two differ at the depth before; the youngest age to that depth's.
        """
        self._values: list[list[float]] = []
        self._doubts: list[list[float]] = []
        younger: list[float] | None = None
        for hits, tries in zip(self._hits, self._tries, strict=True):
            values: list[float] = []
            for depth, (hit, tried) in enumerate(zip(hits, tries, strict=True)):
                prior = values[depth - 1] if depth else PRIOR
                if younger is not None:
                    prior = younger[depth]
                    if depth:
                        prior *= values[depth - 1] / younger[depth - 1]
                    else:
                        prior *= OLDER / (1.0 + (OLDER - 1.0) * prior)
                prior = min(max(prior, 1.0 - MOST_HOPE), MOST_HOPE)
                values.append((hit + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT))
            self._values.append(values)
            self._doubts.append(
                [
                    math.sqrt(value * (1.0 - value) / (tried + PRIOR_WEIGHT))
                    for value, tried in zip(values, tries, strict=True)
                ]
            )
            younger = values

    def hopes(self, optimism: float) -> Floats:
        """``[A, K]`` chances, so many standard errors better than measured: what little is known
        of is worth a try on credit."""
        values, doubts = np.array(self._values), np.array(self._doubts)
        hopes: Floats = np.minimum(values + optimism * doubts, MOST_HOPE)
        return hopes

    def of(self, states: Sequence[RequestState], optimism: float) -> Floats:
        """``[B, K]``: everybody's chances at that age, moved as far as each request differs."""
        weight = OWN_WEIGHTS[self._foretold.index(max(self._foretold))]
        own = np.array([_own_factor(state, weight) for state in states])
        general = self.hopes(optimism)[[age_of(state) for state in states]]
        chances: Floats = np.minimum(general * own[:, None], MOST_HOPE)
        return chances


def age_of(state: RequestState) -> int:
    """Which of the ages the reply of ``state`` is of."""
    num_tokens = state.num_scheduled_tokens - state.num_prompt_tokens
    return sum(num_tokens >= age for age in AGES)


def steps_to_next_age(state: RequestState) -> int:
    """Tokens until the reply of ``state`` comes of its next age."""
    num_tokens = state.num_scheduled_tokens - state.num_prompt_tokens
    return min((age - num_tokens for age in AGES if age > num_tokens), default=NEVER)


def oldest_of(state: RequestState) -> int:
    """Which of the ages the reply of ``state`` can come to."""
    num_tokens = state.max_total_tokens - state.num_prompt_tokens
    return sum(num_tokens >= age for age in AGES)


def _own_factor(state: RequestState, weight: float) -> float:
    """How many times as often drafts of ``state`` are thought to hold as everybody's."""
    return (state.draft_hits + weight) / (state.draft_hopes + weight)

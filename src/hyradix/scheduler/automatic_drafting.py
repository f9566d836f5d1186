"""The size of every round as it pays, and who is followed at all.

Owns: the choice from what is believed, the trials. Does not know: KV slots, tokens, who proposes.

Invariant: while no request waits, drafts are chosen only where each running request is expected to
be faster with them (the one on trial apart).
Read next: ``draft_choice.py`` (the arithmetic); ``draft_acceptance.py``, ``draft_beliefs.py`` (what
is believed).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyradix.scheduler.draft_acceptance import (
    EAGERNESS,
    FORGET,
    MOST_HOPE,
    OPTIMISM,
    Acceptance,
    oldest_of,
    steps_to_next_age,
)
from hyradix.scheduler.draft_beliefs import (
    MOST_STEPS,
    Credit,
    MeasuredCosts,
    Rate,
    promise_of,
)
from hyradix.scheduler.draft_choice import (
    Choice,
    Floats,
    Ints,
    StepCosts,
    choose_chain,
    tree_rate,
)
from hyradix.scheduler.drafting import NO_DRAFTS, Drafting
from hyradix.scheduler.request_state import RequestState
from hyradix.spec_config import DraftShape, RoundCosts, SpecConfig

TREES = (DraftShape(topk=2, steps=4, nodes=8), DraftShape(topk=4, steps=4, nodes=24))
MAX_TREE_ROWS = 8
SECOND_CHANCE = 0.25
"""Of the first drafts that fail, those that a wider tree is thought to catch at first."""
MARGIN, RESUME_MARGIN, TREE_MARGIN = 0.02, 0.05, 0.05
"""A choice must be better than no drafts by this much, and by this where a draft layer has to catch
up first; a tree than the best chain."""
REUSE_STEPS, IDLE_STEPS = 6, 16
"""A choice stands for so many steps, with drafts and without, while the requests are the same, and
of one age; one that loses a large part of the credit is made again at once."""
TRIAL_DEPTH, TRIAL_STEPS = 2, 64
"""A request on trial: how deep where it is not alone, and for how many steps."""
CLOSE, CLOSE_ROUNDS, CLEAR_ROUNDS = 1.25, 16, 64
"""Rounds until a step without drafts is timed again: where drafts gain less than this, or more."""
TRIAL_ROUNDS = 3
"""A trial begins when there is credit for so many of its rounds."""
STAKE = 0.5
"""Of the credit, what a round of chains may take that brings nothing: who stakes a part of what he
has is seldom ruined by bad luck. Too small a part is no help: shallow rounds may lose where deep
ones gain."""
MOST_LOOKUP = 1.2
"""Plain steps that one in which no drafts were found is thought to take at most."""


class AutomaticDrafting(Drafting):
    """Off, chains of any depth for each request, or trees for all of a few requests.

    A request's chance of acceptance is its own, drawn toward everybody's while it is young. Where
    no drafts are best, one request is tried now and then, as credit allows. Where a head has to
    keep up with requests, only those are followed that have drafts, and catch up when they have
    some again; a new one is followed through its prompt if drafts will pay at one of its ages.
    """

    def __init__(self, spec: SpecConfig, costs: RoundCosts | None) -> None:
        super().__init__(spec)
        self._shape = spec.shape
        self._has_upkeep = spec.proposer != "ngram"
        self._costs = MeasuredCosts(costs)
        self._credit = Credit()
        self._is_paused = False
        self._acceptance = Acceptance(spec.shape.steps)
        self._trees = [
            tree
            for tree in TREES
            if tree.topk <= spec.shape.topk
            and tree.nodes <= spec.shape.nodes
            and tree.steps <= spec.shape.steps
        ]
        self._tree_gains: list[Rate | None] = [None] * len(self._trees)
        self._decodes: list[RequestState] = []
        """Whom the plan is for, and how many steps ago it was made."""
        self._age = 0
        self._idle_steps = IDLE_STEPS
        """For how many steps it stands if it is without drafts."""
        self._plan: dict[str, tuple[int, int]] = {}
        self._tree: int | None = None
        self._expected: dict[str, float] = {}
        self._trial: RequestState | None = None
        self._trial_ends = self._step = 0
        self._is_waited_for = False
        self._wants_plain, self._is_plain = False, True
        """Whether this step is to be one without drafts; whether it is one."""
        self._promise = 1.0
        """See ``promise_of``; for those that run now."""
        self._accepted: list[int] = []
        """By request that might have had drafts: those accepted since the last step whose time is
        known."""

    # ---- choose ---------------------------------------------------------------------------------

    def admit(self, state: RequestState, num_running: int) -> None:
        """See ``Drafting``."""
        if not self._has_upkeep:
            return
        costs = self._costs.at(num_running)
        self._credit.begin(costs.plain, promise_of(self._most_gain(num_running, costs)))
        deepest = min(self._depth_at_stake(num_running, costs), self._shape.steps)
        limits = np.full(num_running, deepest)
        self._acceptance.think()
        rates = [
            choose_chain(np.tile(chances, (num_running, 1)), limits, costs).rate
            for chances in self._acceptance.hopes(OPTIMISM)[: oldest_of(state) + 1]
        ]
        pays = max(rates) * costs.plain >= num_running * (1.0 + MARGIN)
        state.is_followed = pays and self._has_credit(costs)

    def begin_step(self, decodes: Sequence[RequestState], *, is_waited_for: bool) -> bool:
        """Choose for all of them at once."""
        self._is_waited_for = is_waited_for
        self._step += 1
        self._age += 1
        is_due = self._age >= (REUSE_STEPS if self._plan else self._idle_steps)
        is_due |= self._wants_plain or (bool(self._plan) and self._credit.is_less)
        if (is_due or decodes != self._decodes) and decodes:
            self._choose(list(decodes))
        self._is_plain = not self._plan
        return bool(self._plan)

    def _choose(self, decodes: list[RequestState]) -> None:
        self._decodes, self._age = decodes, 0
        self._credit.mark()
        self._idle_steps = min(IDLE_STEPS, min(steps_to_next_age(state) for state in decodes))
        self._plan, self._expected, self._tree, self.topk = {}, {}, None, 1
        costs, self._wants_plain = self._costs.at(len(decodes)), False
        most = self._most_gain(len(decodes), costs)
        self._promise = promise_of(most)
        self._credit.begin(costs.plain, self._promise)
        if most >= MARGIN:
            self._choose_from(decodes, costs)
        if self._has_upkeep:
            for state in decodes:
                state.is_followed = state.request_id in self._plan

    def _choose_from(self, decodes: list[RequestState], costs: StepCosts) -> None:
        """Drafts for those for whom they pay, if there is credit."""
        if self._has_credit(costs):
            most = min(self._shape.steps, self._depth_at_stake(len(decodes), costs))
            room = [s.max_total_tokens - s.num_scheduled_tokens - 2 for s in decodes]
            limits = np.array([max(min(most, depth), 0) for depth in room], np.int64)
            self._acceptance.think()
            acceptance = self._acceptance.of(decodes, OPTIMISM)
            choice = choose_chain(acceptance, limits, costs)
            plain = len(decodes) / costs.plain
            is_kept_up = not self._has_upkeep or all(state.is_followed for state in decodes)
            margin = MARGIN if is_kept_up else RESUME_MARGIN
            if choice.rate < plain * (1.0 + margin) or not self._pays_all(choice.least):
                choice = Choice(np.zeros(len(decodes), np.int64), plain)
            self._choose_tree(decodes, acceptance, choice, costs)
            if self._tree is None:
                for state, depth in zip(decodes, choice.depths.tolist(), strict=True):
                    if depth:
                        self._plan[state.request_id] = (depth + 1, depth + 1)
                    else:
                        self._acceptance.give_up(state)
            if self._plan and self._costs.wants_plain(len(decodes), self._rounds(choice, plain)):
                self._plan, self._wants_plain = {}, True
            elif not self._plan:
                self._acceptance.fade()
                self._try_one(decodes, limits, costs)

    def _pays_all(self, least: float) -> bool:
        """Whether drafts make each request faster, or a place that is free early is waited for:
        those who run beside a reply have nothing of it that it ends early."""
        return self._is_waited_for or least >= 1.0 + MARGIN

    def _rounds(self, choice: Choice, plain: float) -> int:
        """How many rounds there may be until the next step without drafts, which costs what drafts
        gain; where a head keeps up with requests, it costs two such steps."""
        rounds = CLOSE_ROUNDS if choice.rate < CLOSE * plain else CLEAR_ROUNDS
        return rounds * (2 if self._has_upkeep else 1)

    def _has_credit(self, costs: StepCosts) -> bool:
        """Once it is used up, nothing is drafted until there is enough for a trial again."""
        credit = self._credit.of(costs.plain)
        enough = TRIAL_ROUNDS * self._trial_cost(costs) if self._is_paused else 0.0
        self._is_paused = credit <= enough
        return not self._is_paused

    def _depth_at_stake(self, num_rows: int, costs: StepCosts) -> int:
        """How deep all may be drafted for, so that one round takes but a part of the credit."""
        stake = self._credit.of(costs.plain) * STAKE * costs.plain - costs.round
        return max(int(stake / (costs.draft + costs.node * num_rows)), TRIAL_DEPTH)

    def _trial_cost(self, costs: StepCosts) -> float:
        """What a round of a trial adds to a step, in plain steps."""
        return (costs.round + (costs.draft + costs.node) * TRIAL_DEPTH) / costs.plain

    def _can_try(self, num_rows: int, costs: StepCosts) -> bool:
        """Whether nobody is on trial, there is the credit that one takes, and drafts that nearly
        always hold would pay for so many rows."""
        if self._trial is not None and self._step < self._trial_ends:
            return False
        cost = TRIAL_ROUNDS * self._trial_cost(costs)
        if self._most_gain(num_rows, costs) < MARGIN:
            return False
        return self._has_credit(costs) and self._credit.of(costs.plain) >= min(cost, MOST_STEPS)

    def _most_gain(self, num_rows: int, costs: StepCosts) -> float:
        """What drafts that nearly always hold would add to the speed of so many rows."""
        best, tokens, chance = 1.0, 1.0, 1.0
        for depth in range(1, self._shape.steps + 1):
            chance *= MOST_HOPE
            tokens += chance
            beside = costs.round + (costs.draft + costs.node * num_rows) * depth
            best = max(best, tokens / (1.0 + beside / costs.plain))
        return best - 1.0

    def _begin_trial(self, state: RequestState) -> None:
        self._trial, self._trial_ends = state, self._step + TRIAL_STEPS

    def _try_one(self, decodes: list[RequestState], limits: Ints, costs: StepCosts) -> None:
        """The request on trial, or else the one that was tried least, has a chain all the same."""
        trial = self._trial
        if trial is None or trial not in decodes:
            if not self._can_try(len(decodes), costs):
                return
            trial = min(decodes, key=lambda state: state.num_draft_rounds)
            self._begin_trial(trial)
        if self._step >= self._trial_ends:
            self._trial = None
            return
        choice = choose_chain(self._acceptance.of(decodes, EAGERNESS), limits, costs)
        if choice.rate * costs.plain < len(decodes) * (1.0 + MARGIN):
            return
        depth = int(choice.depths[decodes.index(trial)])
        if len(decodes) > 1:
            depth = min(depth, TRIAL_DEPTH)
        if depth:
            self._plan[trial.request_id] = (depth + 1, depth + 1)

    def _choose_tree(
        self, decodes: Sequence[RequestState], acceptance: Floats, chain: Choice, costs: StepCosts
    ) -> None:
        """Wider drafts for all, where they are thought to be better than the best chains."""
        num_rows, best = len(decodes), chain.rate * (1.0 + TREE_MARGIN)
        if num_rows > MAX_TREE_ROWS or not all(state.is_followed for state in decodes):
            return
        for i, tree in enumerate(self._trees):
            expected = self._tree_gain(i, acceptance[:, : tree.steps])
            wider = self._costs.draft_of(num_rows, num_rows * tree.topk)
            costs_of_tree = StepCosts(costs.plain, costs.node, wider, costs.round)
            gain = float(expected.mean())
            rate = tree_rate(gain, num_rows, tree.nodes, tree.steps, costs_of_tree)
            seconds = num_rows * (1.0 + gain) / rate
            least = (1.0 + float(expected.min())) * costs.plain / seconds
            if rate > best and self._pays_all(least):
                best, self._tree, self.topk = rate, i, tree.topk
                for state, own in zip(decodes, expected.tolist(), strict=True):
                    self._plan[state.request_id] = (tree.nodes, tree.steps + 1)
                    self._expected[state.request_id] = own

    def _tree_gain(self, index: int, acceptance: Floats) -> Floats:
        """``[B]`` drafts accepted by a tree: a guess, times what the guess was worth so far."""
        wider = acceptance + (1.0 - acceptance) * SECOND_CHANCE
        guess: Floats = np.cumprod(wider, axis=1).sum(axis=1)
        measured = self._tree_gains[index]
        return guess if measured is None else guess * measured.value

    def limit(self, state: RequestState) -> tuple[int, int]:
        """See ``Drafting``."""
        return self._plan.get(state.request_id, NO_DRAFTS)

    # ---- learn ----------------------------------------------------------------------------------

    def learn(self, state: RequestState, num_nodes: int, num_accepted: int, depth: int) -> None:
        """See ``Drafting``."""
        super().learn(state, num_nodes, num_accepted, depth)
        self._accepted.append(num_accepted)
        if num_nodes <= 1:
            return
        expected = self._expected.get(state.request_id)
        if expected is not None and self._tree is not None:
            gain = self._tree_gains[self._tree] or Rate(4.0, 4.0, FORGET)
            gain.add(num_accepted, expected)
            self._tree_gains[self._tree] = gain
            return
        tried = min(num_accepted + 1, depth)
        self._acceptance.learn(state, num_accepted, tried)

    def learn_time(self, num_rows: int, num_nodes: int, depth: int, seconds: float) -> None:
        """See ``Drafting``."""
        accepted, self._accepted = self._accepted, []
        self._credit.earn(seconds * self._promise)
        if num_nodes == num_rows:
            if depth == 0 and self._is_plain:
                self._costs.note_plain(num_rows, seconds)
            elif depth:  # looked for drafts, and found none
                plain = self._costs.at(num_rows).plain
                self._credit.take(min(seconds, MOST_LOOKUP * plain) - plain)
            return
        seconds = self._costs.note_round(num_rows, num_nodes - num_rows, depth, seconds)
        plain = self._costs.at(num_rows).plain
        gained = sum(accepted) / num_rows
        if not self._is_waited_for:
            gained = min(accepted) if len(accepted) >= num_rows else 0.0
        self._credit.take(seconds - plain * (1.0 + gained))


def make_drafting(spec: SpecConfig | None, costs: RoundCosts | None) -> Drafting:
    """The way that ``spec`` asks for. ``costs``: as measured; None: a guess."""
    if spec is not None and spec.is_automatic:
        return AutomaticDrafting(spec, costs)
    return Drafting(spec)

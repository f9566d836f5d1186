"""How many drafts a request may have in its next step, and what came of the last ones.

Owns: the one place where the size of a round is chosen, and what is known of acceptance.
Does not know: KV slots, tokens, who proposes.

Two ways: ``Drafting`` always takes the configured shape, ``AutomaticDrafting`` takes what makes
the most tokens a second. Read next: ``draft_choice.py``, ``rows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyradix.scheduler.draft_choice import (
    Choice,
    Floats,
    Ints,
    StepCosts,
    choose_chain,
    costs_at,
    tree_rate,
)
from hyradix.scheduler.request_state import RequestState
from hyradix.spec_config import DraftShape, RoundCosts, SpecConfig

NO_DRAFTS = (1, 1)


class Drafting:
    """Every round takes the configured shape; without one, no round has drafts."""

    topk = 0
    """Children of a node in the step that is being built; 0: as configured."""

    def __init__(self, spec: SpecConfig | None) -> None:
        self._spec = spec

    def begin_step(self, decodes: Sequence[RequestState]) -> None:
        """These requests decode in the step that is being built."""

    def limit(self, state: RequestState) -> tuple[int, int]:
        """(max_nodes, max_accepted) of the next round of ``state``; (1, 1): no drafts."""
        if self._spec is None:
            return NO_DRAFTS
        return self._spec.shape.nodes, self._spec.shape.max_accepted

    def learn(self, state: RequestState, num_nodes: int, num_accepted: int, depth: int) -> None:
        """A round is committed: ``num_nodes`` with the root, ``num_accepted`` drafts without it.

        depth: drafts that could have been accepted one after the other.
        """
        state.num_draft_rounds += num_nodes > 1
        state.num_draft_tokens += num_nodes - 1
        state.num_accepted_tokens += num_accepted

    def learn_time(self, num_rows: int, num_nodes: int, depth: int, seconds: float) -> None:
        """A step of decodes alone took ``seconds``: ``num_nodes`` in all, drafts ``depth`` deep."""


DEFAULT_COSTS = RoundCosts(
    rows=(1, 32), plain=(1.0, 3.0), node=(0.06, 0.06), draft=(0.12, 0.36), round=(0.05, 0.15)
)
"""Where nothing was measured: in steps of one row."""
TREES = (DraftShape(topk=2, steps=4, nodes=8), DraftShape(topk=4, steps=4, nodes=24))
MAX_TREE_ROWS = 8
PRIOR = 0.7
"""Chance that a draft is accepted, as long as nothing is known."""
PRIOR_WEIGHT = 4.0
FORGET = 0.97
"""Weight that a round keeps when the next one comes."""
SECOND_CHANCE = 0.4
"""Of the first drafts that fail, those that a wider tree is thought to catch at first."""
PROBE_DEPTH = 2
SLOWLY = 0.9999
"""Weight that the time without drafts, and what trials took of it, keep from step to step."""
PROBE_SHARE = 0.007
"""Of the time, what trying drafts may cost while they are thought not to pay."""
REUSE_STEPS, IDLE_STEPS = 4, 8
"""A choice stands for so many steps, with drafts and without, while the requests are the same."""
LEARN = 24.0
"""Drafts that are judged before it is believed that they do not pay."""
LEARN_ROWS = 4
HOST = 1.2
"""Share of a step that the host takes beside the model, until it was measured."""
OUTLIER = 3.0
"""Steps that take longer than that many expected ones say nothing but this."""
MARGIN = 0.02
"""A choice must be better than no drafts by this much."""


@dataclass(slots=True)
class _Rate:
    """A chance that is measured: hits of tries, older ones counting less."""

    tries: float = PRIOR_WEIGHT
    hits: float = PRIOR_WEIGHT * PRIOR

    def add(self, hits: float, tries: float) -> None:
        self.hits = self.hits * FORGET + hits
        self.tries = self.tries * FORGET + tries

    @property
    def value(self) -> float:
        return self.hits / self.tries


class AutomaticDrafting(Drafting):
    """Off, chains of any depth for each request, or trees for all of a few requests.

    A request's chance of acceptance is its own, drawn toward everybody's while it is young. Where
    no drafts are best, requests are still tried now and then, seldom and not for long. Where a
    draft layer would have to keep up with a request (``mtp``), one without drafts is given up for
    good: the KV that the layer has not computed can be had in no other way.
    """

    def __init__(self, spec: SpecConfig, costs: RoundCosts | None) -> None:
        super().__init__(spec)
        self._shape = spec.shape
        self._has_upkeep = spec.proposer == "mtp"
        self._costs = costs or DEFAULT_COSTS
        self._general = [_Rate() for _ in range(spec.shape.steps)]
        self._trees = [
            tree
            for tree in TREES
            if tree.nodes <= spec.shape.nodes and tree.steps <= spec.shape.steps
        ]
        self._tree_gains: list[_Rate | None] = [None] * len(self._trees)
        self._plainness = _Rate(tries=8.0, hits=8.0 * HOST)
        """What a step without drafts takes, next to what was measured at start."""
        self._slowness = _Rate(tries=24.0, hits=24.0)
        """What drafts add to a step, next to what was measured at start."""
        self._plan: dict[str, tuple[int, int]] = {}
        self._time = self._spent = 0.0
        """Seconds without drafts, and those that trials added to them."""
        self._names: list[str] = []
        """Whom the plan is for, and how many steps ago it was made."""
        self._age = 0
        self._tree: int | None = None
        self._expected: dict[str, float] = {}

    # ---- choose ---------------------------------------------------------------------------------

    def begin_step(self, decodes: Sequence[RequestState]) -> None:
        """Choose for all of them at once."""
        names = [state.request_id for state in decodes]
        self._age += 1
        if names == self._names and self._age < (REUSE_STEPS if self._plan else IDLE_STEPS):
            return
        self._names, self._age = names, 0
        self._plan, self._expected, self._tree, self.topk = {}, {}, None, 1
        if not any(state.is_followed for state in decodes):
            return
        costs = self._step_costs(len(decodes))
        acceptance = self._acceptance(decodes)
        room = [(s.max_total_tokens - s.num_scheduled_tokens - 2) * s.is_followed for s in decodes]
        limits = np.clip(np.array(room, np.int64), 0, self._shape.steps)
        if self._general[0].tries < PRIOR_WEIGHT + LEARN:
            self._try_out(decodes, limits)
            return
        choice = choose_chain(acceptance, limits, costs)
        plain = len(decodes) / costs.plain
        if choice.rate < plain * (1.0 + MARGIN):
            choice = Choice(np.zeros(len(decodes), np.int64), plain)
        self._choose_tree(decodes, acceptance, choice, costs)
        if self._tree is None:
            for state, depth in zip(decodes, choice.depths.tolist(), strict=True):
                if depth:
                    self._plan[state.request_id] = (depth + 1, depth + 1)
            if not self._plan:
                self._probe(decodes, limits, costs)
        if self._has_upkeep:
            for state in decodes:
                state.is_followed = state.request_id in self._plan

    def _try_out(self, decodes: Sequence[RequestState], limits: Ints) -> None:
        """At first too little is known for a choice: a few requests have short chains."""
        for state, limit in zip(decodes[:LEARN_ROWS], limits.tolist(), strict=False):
            depth = min(PROBE_DEPTH + 1, limit)
            self._plan[state.request_id] = (depth + 1, depth + 1)

    def _step_costs(self, num_rows: int) -> StepCosts:
        found = costs_at(self._costs, num_rows)
        plain, slow = found.plain * self._plainness.value, self._slowness.value
        return StepCosts(plain, found.node * slow, found.draft * slow, found.round * slow)

    def _acceptance(self, decodes: Sequence[RequestState]) -> Floats:
        """``[B, K]``: that of everybody by depth, moved as far as each request differs from it."""
        general = np.array([rate.value for rate in self._general])
        tries = np.array([s.draft_tries for s in decodes])
        hits = np.array([s.draft_hits for s in decodes])
        own = (hits + PRIOR_WEIGHT * general[0]) / (tries + PRIOR_WEIGHT)
        chances: Floats = np.clip(general * (own / general[0])[:, None], 0.0, 0.98)
        return chances

    def _choose_tree(
        self, decodes: Sequence[RequestState], acceptance: Floats, chain: Choice, costs: StepCosts
    ) -> None:
        """Wider drafts for all, where they are thought to be better than the best chains."""
        num_rows, best = len(decodes), chain.rate * (1.0 + MARGIN)
        if num_rows > MAX_TREE_ROWS or not all(state.is_followed for state in decodes):
            return
        for i, tree in enumerate(self._trees):
            expected = self._tree_gain(i, acceptance[:, : tree.steps])
            wider = costs_at(self._costs, num_rows, num_drafting=num_rows * tree.topk)
            costs_of_tree = StepCosts(
                costs.plain, costs.node, wider.draft * self._slowness.value, costs.round
            )
            gain = float(expected.mean())
            rate = tree_rate(gain, num_rows, tree.nodes, tree.steps, costs_of_tree)
            if rate > best:
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

    def _probe(self, decodes: Sequence[RequestState], limits: Ints, costs: StepCosts) -> None:
        """Now and then one request is tried although drafts are thought not to pay: the one whose
        last trial is longest ago, where trials have not cost their share of the time yet."""
        able = [i for i, limit in enumerate(limits.tolist()) if limit >= PROBE_DEPTH]
        extra = costs.round + (costs.draft + costs.node) * PROBE_DEPTH
        if not able or self._spent + REUSE_STEPS * extra > PROBE_SHARE * self._time:
            return
        self._spent += REUSE_STEPS * extra
        state = min((decodes[i] for i in able), key=lambda state: state.num_draft_rounds)
        self._plan[state.request_id] = (PROBE_DEPTH + 1, PROBE_DEPTH + 1)

    def limit(self, state: RequestState) -> tuple[int, int]:
        """See ``Drafting``."""
        return self._plan.get(state.request_id, NO_DRAFTS)

    # ---- learn ----------------------------------------------------------------------------------

    def learn(self, state: RequestState, num_nodes: int, num_accepted: int, depth: int) -> None:
        """See ``Drafting``."""
        super().learn(state, num_nodes, num_accepted, depth)
        expected = self._expected.get(state.request_id)
        if num_nodes <= 1:
            return
        tried = min(num_accepted + 1, depth)
        if expected is not None and self._tree is not None:
            gain = self._tree_gains[self._tree] or _Rate(tries=4.0, hits=4.0)
            gain.add(num_accepted, expected)
            self._tree_gains[self._tree] = gain
            return
        state.draft_hits = state.draft_hits * FORGET + num_accepted
        state.draft_tries = state.draft_tries * FORGET + tried
        for d in range(tried):
            self._general[d].add(float(d < num_accepted), 1.0)

    def learn_time(self, num_rows: int, num_nodes: int, depth: int, seconds: float) -> None:
        """See ``Drafting``."""
        costs = costs_at(self._costs, num_rows)
        if num_nodes == num_rows:
            self._plainness.add(min(seconds / costs.plain, OUTLIER), 1.0)
            self._spent *= SLOWLY
            self._time = self._time * SLOWLY + seconds
            return
        beside = costs.round + costs.draft * depth + costs.node * (num_nodes - num_rows)
        measured = seconds - costs.plain * self._plainness.value
        self._slowness.add(min(max(measured / beside, 1.0 / OUTLIER), OUTLIER), 1.0)


def make_drafting(spec: SpecConfig | None, costs: RoundCosts | None) -> Drafting:
    """The way that ``spec`` asks for. ``costs``: as measured; None: a guess."""
    if spec is not None and spec.is_automatic:
        return AutomaticDrafting(spec, costs)
    return Drafting(spec)

"""Scenarios on real states: an engine whose every reply is compared with that of a cold, plain run.

Owns: the ways to serve, the comparison, the scenarios that the interpreter runs too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.drafts import serve
from tests.oracles.schedules import first_difference, make_reference, make_request
from tests.support.demo import Engines

CHAIN = {"spec": "ngram", "spec_topk": 1, "spec_steps": 4}
TREE = {"spec": "ngram", "spec_topk": 3, "spec_steps": 3, "spec_nodes": 10}
Way = dict[str, object]
WAYS: dict[str, Way] = {
    "plain": {},
    "overlap": {"overlap": True},
    "log": {"decode_log": 8},
    "log, overlap": {"decode_log": 8, "overlap": True},
    "chain snapshot": {**CHAIN, "spec_state": "snapshot"},
    "tree snapshot": {**TREE, "spec_state": "snapshot"},
    "tree replay": {**TREE, "spec_state": "replay"},
    "chain log": {**CHAIN, "spec_state": "log"},
    "tree log": {**TREE, "spec_state": "log"},
}
REPLY = 24
NEAR_TIE = 1e-2
"""On a device, where a product of few rows is not summed as one of many: a gap of logprobs below
which another token is no fault, where logits are hundreds. On the CPU none is."""


class Judged:
    """Engines, and the cold runs of ``twin``, or their own."""

    def __init__(
        self, engines: Engines, twin: Engines | None = None, token_ids: range = range(10, 97)
    ) -> None:
        self.engines = engines
        self.reference = make_reference(twin or engines)
        self.token_ids = token_ids
        self.near_tie = NEAR_TIE if engines.model().ops.name == "triton" else 0.0


class Served:
    """One engine; every reply is compared with that of a cold, plain run."""

    def __init__(self, judged: Judged, way: Way, **options: object) -> None:
        self._judged = judged
        base = {"num_threads": 1, "max_requests": 4, "check_invariants": True, "track_interval": 0}
        self.engine = judged.engines.make(**{**base, **way, **options})
        self.is_drafting = "spec" in way
        self._count = 0

    def text(self, seed: int, count: int) -> list[int]:
        return text(seed, count, self._judged.token_ids)

    def replies(self, *prompts: list[int], max_tokens: int = REPLY) -> list[tuple[list[int], int]]:
        """(Reply, tokens that came from the cache) of each, served at once."""
        requests = []
        for prompt in prompts:
            self._count += 1
            request = make_request(f"r{self._count}", prompt, (), max_tokens=max_tokens)
            requests.append(request)
        found = serve(self.engine, requests)
        for request in requests:
            expected, gaps = self._judged.reference.run(request)
            at = first_difference(found[request.request_id][0], expected)
            if at is not None:
                assert at < len(gaps)
                assert gaps[at] < self._judged.near_tie, (request.request_id, at, gaps[at])
                print(f"a near tie: {request.request_id}, token {at}, gap {gaps[at]:.1e}")
        return [(found[r.request_id][0], found[r.request_id][2]) for r in requests]

    def close(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_accepted_tokens > 0) == self.is_drafting
        assert stats.state.held == stats.kv.held == 0


def text(seed: int, count: int, token_ids: range = range(10, 97)) -> list[int]:
    """Random tokens."""
    drawn = np.random.default_rng(seed).integers(token_ids.start, token_ids.stop, count)
    return drawn.tolist()


def branching(s: Served, *, shared: int = 37, tail: int = 41, max_tokens: int = REPLY) -> None:
    """C2: four prompts that part at the same place; the third and the fourth resume there."""
    prefix = s.text(1, shared)
    for number, least in ((2, 0), (3, 0), (4, shared), (5, shared)):
        ((_, cached),) = s.replies(prefix + s.text(number, tail), max_tokens=max_tokens)
        assert cached >= least
        assert cached in (0, shared)
    s.close()


def preempted(
    s: Served, *, shared: Sequence[int] = (40, 33, 12), tail: int = 20, max_tokens: int = REPLY
) -> None:
    """C8: three at once, thrown out again and again."""
    prefix = s.text(400, max(shared))
    prompts = [prefix[:n] + s.text(n, tail) for n in shared]
    s.replies(*prompts, max_tokens=max_tokens)
    assert s.engine.stats().num_preemptions >= 5
    s.close()

"""C1, C2, C3, C5, C8, C10, C20 where the state is real: a tiny model of each recurrence.

The other tests of these scenarios see which slots are used, with a data plane that is a hash; here
the tokens come out of GDN, Mamba2 and KDA, so they show whether what was kept is exact.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.drafts import serve
from tests.oracles.schedules import Reference, make_reference, make_request
from tests.support.demo import Engines
from tests.support.tiny_engines import RECURRENCES, make_engines

pytestmark = pytest.mark.slow
CHAIN = {"spec": "ngram", "spec_topk": 1, "spec_steps": 4}
TREE = {"spec": "ngram", "spec_topk": 3, "spec_steps": 3, "spec_nodes": 10}
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "log": {"decode_log": 8},
    "chain snapshot": {**CHAIN, "spec_state": "snapshot"},
    "tree snapshot": {**TREE, "spec_state": "snapshot"},
    "tree replay": {**TREE, "spec_state": "replay"},
    "chain log": {**CHAIN, "spec_state": "log"},
    "tree log": {**TREE, "spec_state": "log"},
}
ways = pytest.mark.parametrize("way", WAYS)
REPLY = 24


@pytest.fixture(scope="module", params=RECURRENCES)
def served(request, tmp_path_factory) -> tuple[Engines, Reference]:
    engines = make_engines(RECURRENCES[request.param], tmp_path_factory.mktemp(request.param))
    return engines, make_reference(engines)


class Served:
    """One engine; every reply is compared with that of a cold, plain run."""

    def __init__(self, served: tuple[Engines, Reference], way: str, **options: object) -> None:
        engines, self.reference = served
        base = {"num_threads": 1, "max_requests": 4, "check_invariants": True, "track_interval": 0}
        self.engine = engines.make(**{**base, **WAYS[way], **options})
        self.is_drafting = "spec" in WAYS[way]
        self._count = 0

    def replies(self, *prompts: list[int], max_tokens: int = REPLY) -> list[tuple[list[int], int]]:
        """(Reply, tokens that came from the cache) of each, served at once."""
        requests = []
        for prompt in prompts:
            self._count += 1
            request = make_request(f"r{self._count}", prompt, (), max_tokens=max_tokens)
            requests.append(request)
        found = serve(self.engine, requests)
        for request in requests:
            expected, _ = self.reference.run(request)
            assert found[request.request_id][0] == expected
        return [(found[r.request_id][0], found[r.request_id][2]) for r in requests]

    def close(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_accepted_tokens > 0) == self.is_drafting
        assert stats.state.held == stats.kv.held == 0


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 97, count).tolist()


@ways
@pytest.mark.parametrize("chunk", [16, 0])
def test_c1_c10_resuming_where_no_chunk_ends(served, way: str, chunk: int) -> None:
    s = Served(served, way, max_prefill_tokens=chunk)
    for n in (47, 48, 49, 64, 65, 70):
        prompt = text(n, n)
        ((_, cached),) = s.replies(prompt)
        assert cached == 0
        ((_, cached),) = s.replies(prompt)
        assert cached == n - 1
    s.close()


@ways
@pytest.mark.parametrize("chunk", [16, 0])
def test_c2_the_third_resumes_where_the_first_two_part(served, way: str, chunk: int) -> None:
    s = Served(served, way, max_prefill_tokens=chunk)
    shared = text(1, 37)
    for number, least in ((2, 0), (3, 0), (4, 37), (5, 37)):
        ((_, cached),) = s.replies(shared + text(number, 41))
        assert cached >= least
        assert cached in (0, 37)
    s.close()


@ways
def test_c3_c20_the_next_turn_resumes_at_the_replys_end(served, way: str) -> None:
    """Replies end at every place of a round: of each length from 20 on."""
    s = Served(served, way)
    for length in range(20, 26):
        conversation, end = text(100 + length, 40), 0
        for turn in range(3):
            ((reply, cached),) = s.replies(conversation, max_tokens=length)
            assert cached == end
            conversation = conversation + reply
            end = len(conversation) - 1  # the last token was sampled, not consumed
            conversation = conversation + text(200 + turn, 9)
    s.close()


@ways
def test_c5_tracks_inside_accepted_runs(served, way: str) -> None:
    """A track at every third token; the one before a cut is where a shorter prefix resumes."""
    s = Served(served, way, track_interval=3, min_gain=0, force_preempt_every=5)
    for number in range(3):
        prompt = text(300 + number, 35)
        ((reply, _),) = s.replies(prompt)
        whole = prompt + reply
        for cut in (len(prompt) + 5, len(prompt) + 10, len(prompt) + 17):
            s.replies(whole[:cut] + text(cut, 6))
    s.close()


@ways
@pytest.mark.parametrize("donate", ["always", "never"])
def test_c8_preempted_and_resumed(served, way: str, donate: str) -> None:
    s = Served(served, way, force_preempt_every=3, preempt_donate=donate, max_prefill_tokens=16)
    shared = text(400, 40)
    s.replies(*(shared[:n] + text(n, 20) for n in (40, 33, 12)))
    assert s.engine.stats().num_preemptions >= 5
    s.close()

"""O1 on a tiny model of each family: cache on and off, chunks, preemption, the log, drafts."""

from __future__ import annotations

import pytest

from tests.oracles.schedules import Reference, make_reference, run
from tests.support.demo import Engines
from tests.support.tiny_engines import FAMILIES, SIZES, make_engines

CHAIN = {"spec": "ngram", "spec_topk": 1, "spec_steps": 3}
TREE = {"spec": "ngram", "spec_topk": 3, "spec_steps": 3, "spec_nodes": 8}
WAYS: dict[str, dict[str, object]] = {
    "cache off": {"prefix_cache": False},
    "preempted with overlap": {"overlap": True, "force_preempt_every": 5},
    "log": {"decode_log": 8, "force_preempt_every": 7},
    "chain snapshot": {**CHAIN, "spec_state": "snapshot", "force_preempt_every": 6},
    "chain log, cache off": {**CHAIN, "spec_state": "log", "prefix_cache": False},
    "tree replay": {**TREE, "spec_state": "replay", "force_preempt_every": 6},
    "tree log": {**TREE, "spec_state": "log"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory) -> tuple[Engines, Reference]:
    engines = make_engines(request.param, tmp_path_factory.mktemp(request.param))
    return engines, make_reference(engines)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_cold_plain_runs(served: tuple[Engines, Reference], way: str) -> None:
    """Two schedules, with chunks of 7 and of 16 tokens."""
    engines, reference = served
    options = WAYS[way]
    tally = run(engines, 2, 5, sizes=SIZES, reference=reference, **options)
    assert not tally.failures
    assert not tally.near_ties
    assert (tally.cached_tokens > 0) == bool(options.get("prefix_cache", True))
    assert (tally.preemptions > 0) == ("force_preempt_every" in options)
    assert (tally.accepted_tokens >= 20) == ("spec" in options)

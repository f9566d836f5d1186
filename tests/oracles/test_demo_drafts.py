"""O1 with drafts on the demo model, a little of it: the whole is a recorded run (``drafts.py``)."""

from __future__ import annotations

import pytest

from tests.oracles.draft_distribution import Job, draw, p_value
from tests.oracles.drafts import Case, make_reference, run_case
from tests.oracles.prompts import load_conversations
from tests.support.demo import DemoEngines


@pytest.fixture(scope="module")
def engines() -> DemoEngines:
    return DemoEngines()


@pytest.fixture(scope="module")
def references(engines: DemoEngines):
    some = load_conversations()[::45]
    return {s: make_reference(engines, some, s) for s in ("greedy", "seeded")}


CASES = [
    Case("ngram", "tree63", "replay", True, "greedy"),
    Case("ngram", "chain3", "snapshot", False, "seeded"),
    Case("mtp", "chain3", "snapshot", True, "seeded"),
    Case("mtp", "tree8", "log", True, "greedy"),
    Case("frozen_kv_mtp", "chain3", "replay", True, "seeded"),
    Case("frozen_kv_mtp", "tree8", "log", False, "greedy"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.proposer}-{c.shape}-{c.mode}")
def test_outputs_are_those_of_plain_decode(engines: DemoEngines, references, case: Case) -> None:
    outcome = run_case(engines, case, references[case.sampling])
    assert not outcome.failures
    assert len(outcome.near_ties) <= 1
    assert outcome.accepted_tokens


@pytest.mark.slow
def test_a_biased_acceptance_is_noticed(engines: DemoEngines) -> None:
    """The test of the recorded run can fail: 600 draws are enough for a bias of a third."""
    one = draw(engines, Job("mtp", 0, 300))
    other = draw(engines, Job("mtp", 1000, 300))
    assert p_value(one[0], other[0]) > 0.001
    biased = draw(engines, Job("mtp", 2000, 300, is_biased=True, share=0.35))
    assert min(p_value(a, b) for a, b in zip(one, biased, strict=True)) < 0.001

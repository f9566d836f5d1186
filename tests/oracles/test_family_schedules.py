"""O1 on a tiny model of each family: cache on and off, chunks, preemption, the log, drafts."""

from __future__ import annotations

import pytest

from tests.oracles.schedules import Judge, make_reference, run
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


NEAR_TIE = 1e-2
"""On a GPU, where a product of few rows is not summed as one of many, and logits are hundreds; on
the CPU none is met."""
ON_GPU = [pytest.param(f"{name} cuda", marks=pytest.mark.gpu) for name in FAMILIES]
Served = tuple[Engines, list[Judge]]


@pytest.fixture(scope="module", params=[*FAMILIES, *ON_GPU])
def served(request, tmp_path_factory) -> Served:
    """On a GPU the CPU's cold runs judge as well."""
    family, _, device = request.param.partition(" ")
    directory = tmp_path_factory.mktemp(family)
    on_cpu = make_engines(family, directory)
    judges = [Judge("cpu", make_reference(on_cpu), NEAR_TIE if device else 0.0)]
    if not device:
        return on_cpu, judges
    engines = make_engines(family, directory, device=device)
    return engines, [*judges, Judge("cold", make_reference(engines), NEAR_TIE)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_cold_plain_runs(served: Served, way: str) -> None:
    """Two schedules, with chunks of 7 and of 16 tokens."""
    engines, judges = served
    options = WAYS[way]
    tally = run(engines, 2, 5, sizes=SIZES, judges=judges, **options)
    assert not tally.failures
    print(tally.near_ties)
    assert (tally.cached_tokens > 0) == bool(options.get("prefix_cache", True))
    assert (tally.preemptions > 0) == ("force_preempt_every" in options)
    assert (tally.accepted_tokens >= 20) == ("spec" in options)

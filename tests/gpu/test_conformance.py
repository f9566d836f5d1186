"""Engines on small models of each recurrence as a GPU serves them, in the interpreter.

A few scenarios of ``tests/conformance/test_real_models.py``, which runs all of them on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.conformance.real_models import Judged, Served, branching, preempted
from tests.gpu.models import Models, SmallEngines

pytestmark = pytest.mark.slow
RECURRENCES = {"gdn": "qwen3_5", "mamba2": "bamba", "kda": "kimi_linear"}
WAY = {"decode_log": 4, "overlap": True, "kv_slots": 160, "states": 12, "min_gain": 1}


@pytest.fixture
def judged(models: Models, device: torch.device, request: pytest.FixtureRequest) -> Judged:
    """By torch's cold runs on the CPU."""

    def engines(backend: str, place: str) -> SmallEngines:
        name = RECURRENCES[request.param]
        return SmallEngines(models.load("small", name, backend, place, "float32"))

    return Judged(engines("triton", str(device)), engines("torch", "cpu"), range(29))


@pytest.mark.parametrize("judged", RECURRENCES, indirect=True)
def test_c2_the_third_resumes_where_the_first_two_part(judged: Judged) -> None:
    branching(Served(judged, WAY, max_prefill_tokens=8), shared=11, tail=4, max_tokens=4)


@pytest.mark.parametrize("judged", ["gdn"], indirect=True)
def test_c8_preempted_and_resumed(judged: Judged) -> None:
    served = Served(judged, WAY, force_preempt_every=2, max_prefill_tokens=8)
    preempted(served, shared=(9, 7), tail=4, max_tokens=6)

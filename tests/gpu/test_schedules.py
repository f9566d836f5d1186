"""O1 by the runner that serves on a GPU, on a model small enough for the interpreter.

On a GPU ``tests/oracles`` has it for every family.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.models import Models, SmallEngines
from tests.oracles.schedules import TINY, Judge, make_reference, run

pytestmark = pytest.mark.slow
SIZES = dataclasses.replace(TINY, token_ids=range(29))


def test_outputs_are_those_of_cold_runs_by_triton_and_by_torch(
    models: Models, device: torch.device
) -> None:
    """Overlapped, through the log, preempted, with what the cache gives back."""

    def engines(backend: str, place: str) -> SmallEngines:
        return SmallEngines(models.load("small", "bamba", backend, place, "float32"))

    ours = engines("triton", str(device))
    judges = [Judge("cold", make_reference(ours))]
    judges.append(Judge("cpu", make_reference(engines("torch", "cpu"))))
    tally = run(
        ours, 1, 2, sizes=SIZES, judges=judges,
        overlap=True, decode_log=4, force_preempt_every=4, min_gain=1,
    )  # fmt: skip
    assert not tally.failures
    assert tally.cached_tokens
    assert tally.preemptions

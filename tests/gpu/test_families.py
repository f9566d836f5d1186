"""Every family's logits on a device against a cold forward by torch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.models import CHECKPOINTS, REAL, SMALL, Models
from tests.gpu.taught import Taught, expected, play

pytestmark = pytest.mark.slow
RUNNERS = ("device", "synchronous")
LOGS = {"small": (4,), "checkpoint": (0, 4, 16), "real": (0, 16)}
LIMITS = {"float32": (1e-4, 1e-4), "bfloat16": (0.05, 0.5)}
"""Largest difference over the largest logit of its position, of half of the positions and of all.
Rounded activations move a router's near ties, and all that comes behind them."""


def cases() -> list[Any]:
    """The interpreter runs small models; a GPU all, by the runner that serves with every log."""
    found = []
    for i, name in enumerate(SMALL):
        case = ("cpu", "small", name, RUNNERS[i % 4 == 3], 4 * (i != 1), "float32")
        found.append(pytest.param(*case))
    found.append(pytest.param("cpu", "small", "qwen3_5", "device", 4, "bfloat16"))
    names = [("small", x) for x in SMALL] + [("checkpoint", x) for x in CHECKPOINTS]
    for kind, name in names + [("real", x) for x in REAL]:
        ways = [("device", log, dtype) for log in LOGS[kind] for dtype in LIMITS]
        ways += [("synchronous", log, "float32") for log in LOGS[kind][:2]]
        found += [pytest.param("cuda", kind, name, *way, marks=pytest.mark.gpu) for way in ways]
    return found


@pytest.mark.parametrize(
    ("device", "kind", "name", "runner", "log", "dtype"), cases(), indirect=["device"]
)
def test_logits_are_those_of_a_cold_forward(
    models: Models, device: torch.device, kind: str, name: str, runner: str, log: int, dtype: str
) -> None:
    """Whatever is a chunk, a decode, a state that was saved or one that was gone on from."""
    model = models.load(kind, name, "triton", str(device), dtype)
    player = Taught(
        model, has_device_runner=runner == "device", decode_log=log, max_requests=5,
        max_prefill_tokens=64, kv_slots=256, states=8,
    )  # fmt: skip
    play(player, 6 if device.type == "cpu" else 40)
    cold = expected(models.load(kind, name, "torch", "cpu", dtype), player)
    errors = []
    for row, at, logits in player.found():
        assert logits.isfinite().all(), (row, at)
        scale = cold[row][at].abs().max()
        errors.append(float((logits - cold[row][at]).abs().max() / scale))
    errors.sort()
    middle, last = errors[len(errors) // 2], errors[-1]
    print(f"{len(errors)} positions, half of them {middle:.1e}, all {last:.1e}")
    of_half, of_all = LIMITS[dtype]
    assert middle < of_half
    assert last < of_all

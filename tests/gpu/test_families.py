"""Every family's logits on a device against a cold float32 forward by torch on the CPU.

In bfloat16 a router's near tie may be turned over, and from the expert on that a token gets
instead, it and all that comes behind it are another text: one such token of 40 took ``kimi_linear``
from errors of 0.03 to 0.8, on the CPU as in the interpreter, while with the experts dictated both
stayed at 0.04. What rounding does apart from that shows where nothing is chosen: there every expert
is every token's. What is chosen is compared in float32, and by the kernels' own tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyradix.models.decoder import Decoder
from tests.gpu.models import CHECKPOINTS, REAL, SMALL, Models
from tests.gpu.taught import FACTORS, FLOORS, LIMIT, Taught, expected, half_and_all, play

pytestmark = pytest.mark.slow
RUNNERS = ("device", "synchronous")
LOGS = {"small": (4,), "checkpoint": (0, 4, 16), "real": (0, 16)}
DTYPES = ("float32", "bfloat16")


def cases() -> list[Any]:
    """The interpreter runs small models; a GPU all, by the runner that serves with every log."""
    found = []
    for i, name in enumerate(SMALL):
        case = ("cpu", "small", name, RUNNERS[i % 4 == 3], 4 * (i != 1), "float32")
        found.append(pytest.param(*case))
    for name in ("qwen3_5", "kimi_linear"):
        found.append(pytest.param("cpu", "small", name, "device", 4, "bfloat16"))
    names = [("small", x) for x in SMALL] + [("checkpoint", x) for x in CHECKPOINTS]
    for kind, name in names + [("real", x) for x in REAL]:
        ways = [("device", log, dtype) for log in LOGS[kind] for dtype in DTYPES]
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

    def load(backend: str, place: str, dtype: str) -> Decoder:
        return models.load(kind, name, backend, place, dtype, chooses=not is_rounded)

    is_rounded = dtype == "bfloat16"
    player = Taught(
        load("triton", str(device), dtype), has_device_runner=runner == "device", decode_log=log,
        max_requests=5, max_prefill_tokens=64, kv_slots=512, states=10,
    )  # fmt: skip
    play(player, 6 if device.type == "cpu" else 40)
    cold = expected(load("torch", "cpu", "float32"), player)
    found = list(player.found())
    errors = half_and_all(found, cold)
    print(f"{len(found)} positions, half of them {errors[0]:.1e}, all {errors[1]:.1e}")
    if not is_rounded:
        assert errors[1] < LIMIT
        return
    rounded = expected(load("torch", "cpu", dtype), player)
    twins = half_and_all(((row, at, rounded[row][at]) for row, at, _ in found), cold)
    print(f"torch on the CPU: half of them {twins[0]:.1e}, all {twins[1]:.1e}")
    for error, twin, factor, floor in zip(errors, twins, FACTORS, FLOORS, strict=True):
        assert error < factor * twin + floor

"""Steps on a device, in Triton's interpreter where there is none; skipped without Triton."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = not torch.cuda.is_available()
if HAS_TRITON and IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

NEED_TRITON = ["test_device_*.py"]
collect_ignore_glob = [] if HAS_TRITON else NEED_TRITON


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """The interpreter's, or (``-m gpu``) the real one."""
    if request.param == "cpu" and not IS_INTERPRETED:
        pytest.skip("kernels are compiled here")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _interpreter_warnings() -> Iterator[None]:
    """The interpreter itself turns arrays of one element into numbers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        yield


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: nothing is split for it."""
    if not (HAS_TRITON and IS_INTERPRETED):
        return
    from hyradix.kernels import triton_table as table

    monkeypatch.setitem(table._MULTIPROCESSORS, "cpu", 1)
    whole = ((1, table.StepConfig(16, 1)),)
    monkeypatch.setitem(table._STEP, "cpu", whole)
    monkeypatch.setitem(table._STEP_LOG, "cpu", whole)

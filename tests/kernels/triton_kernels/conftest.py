"""The Triton kernels, in Triton's interpreter where there is no device; skipped without Triton."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = not torch.cuda.is_available()
if IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


if HAS_TRITON:
    from tests.kernels.triton_kernels.memory_check import checked_memory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles comes first: once something was interpreted, Triton compiles nothing."""
    items.sort(key=lambda item: item.path.name != "test_ahead.py")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """The interpreter's, or (``-m gpu``) the real one."""
    if request.param == "cpu" and not IS_INTERPRETED:
        pytest.skip("kernels are compiled here")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _memory(request) -> Iterator[None]:
    """Accesses of interpreted kernels are checked, for races too; ``memory_check.py``."""
    if not IS_INTERPRETED:
        yield
        return
    with checked_memory(races=True):
        yield


@pytest.fixture(autouse=True)
def _interpreter_warnings() -> Iterator[None]:
    """The interpreter itself turns arrays of one element into numbers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        yield

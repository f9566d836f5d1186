"""Whole models by the Triton backend: interpreted where there is no GPU, skipped without Triton."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.kernels.triton_kernels.conftest import HAS_TRITON, IS_INTERPRETED, device

__all__ = ["device"]
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]

if HAS_TRITON and IS_INTERPRETED:
    from tests.support.interpreter import mend_bfloat16

    mend_bfloat16()


@pytest.fixture(autouse=True)
def _interpreter_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        yield

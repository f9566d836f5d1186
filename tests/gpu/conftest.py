"""Whole models on a device, in Triton's interpreter where there is none; skipped without Triton."""

from __future__ import annotations

import pytest

from tests.gpu.models import Models
from tests.runner.device.conftest import (
    HAS_TRITON,
    IS_INTERPRETED,
    _few_programs,
    _interpreter_warnings,
    device,
)

__all__ = ["_few_programs", "_interpreter_warnings", "device"]
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]

if HAS_TRITON and IS_INTERPRETED:
    from tests.support.interpreter import mend_bfloat16

    mend_bfloat16()


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    """Each loaded when it is first asked for."""
    return Models(tmp_path_factory.mktemp("models"))

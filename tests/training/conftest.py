"""Makes the scripts of `training/` importable, and gives the tests the shipped folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

# The scripts import one another by bare names, as they do when they are run. At the end of the path
# they shadow no installed package.
sys.path.append(str(ROOT / "training"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are too small for more threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shipped() -> Path:
    return ROOT / "src" / "hyradix" / "demo_model"

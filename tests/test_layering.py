"""Imports only go down, and the control plane does not know torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTROL_PLANE = [
    "hyradix",
    "hyradix.errors",
    "hyradix.config",
    "hyradix.request",
    "hyradix.state_bytes",
    "hyradix.cache.prefix_cache",
    "hyradix.cache.invariants",
    "hyradix.scheduler.scheduler",
    "hyradix.text",
    "hyradix.models.registry",
    "hyradix.server.memory",
]


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as f; f()"]
    done = subprocess.run(
        [*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_importing_it_leaves_torch_out(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print(*[m for m in ('torch', 'numba', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""

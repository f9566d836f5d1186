"""What every kept figure says of itself: command, commit, device, date.

Owns: the frame of the reports that the bench commands and ``benchmarks/`` write.
Does not know: what was measured, torch.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hyradix.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
"""The checkout, where this package runs from one."""
_OUTPUTS = ("--json", "--plot")


def frame(command: Sequence[str], device: str = "", *, sources: str = "src") -> dict[str, Any]:
    """Where, when and by which command a figure is measured.

    device: as its maker calls it; empty: the CPU. sources: a change here is noted at the commit.
    """
    return {
        "command": shlex.join(_without_outputs(command)),
        "commit": os.environ.get("HYRADIX_COMMIT") or _commit(sources),
        "date": datetime.date.today().isoformat(),
        "device": device or cpu_name(),
        "load": round(os.getloadavg()[0], 1),
        "software": {"python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "triton", "numba", "numpy")},
    }


def cpu_name() -> str:
    """The processor, with the cores that may be used."""
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Raises ``ConfigError`` where that cannot be done."""
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="json") from None


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """Where a figure is written is no part of how it came about."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if not skips and not argument.startswith(_OUTPUTS):
            kept.append(argument)
        skips = argument in _OUTPUTS
    return kept


def _commit(sources: str) -> str:
    name = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    is_changed = bool(_git("status", "--porcelain", "-uno", "--", "src", sources))
    return name + "+changes" * is_changed


def _git(*arguments: str) -> str:
    """What it prints; nothing where there is no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"

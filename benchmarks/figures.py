"""What every kept figure says of itself: command, commit, device, date.

Owns: the frame of the JSON files under ``benchmarks/results``. Does not know: what was measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def frame() -> dict[str, Any]:
    """Where, when and by which command a figure is measured."""
    script, *arguments = sys.argv
    path = Path(script).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return {
        "command": shlex.join(["python", name, *_without_json(arguments)]),
        "commit": _git("rev-parse", "--short=12", "HEAD") + ("+changes" if _is_changed() else ""),
        "date": datetime.date.today().isoformat(),
        "device": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib()} GiB",
        "load": round(os.getloadavg()[0], 1),
        "software": {"python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "numba", "numpy")},
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write ``results`` in its frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(FRAME | {"results": results}, indent=1) + "\n")
    print(f"written: {path}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes, rounded to four digits."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    figures = {"median": median, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _without_json(arguments: Sequence[str]) -> list[str]:
    """Where a figure is written is no part of how it came about."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if not skips and not argument.startswith("--json"):
            kept.append(argument)
        skips = argument == "--json"
    return kept


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("HYRADIX_COMMIT", "unknown") if "rev-parse" in arguments else ""
    return done.stdout.strip()


def _is_changed() -> bool:
    """Whether tracked files under src or benchmarks differ from the commit (results aside)."""
    return bool(_git("status", "--porcelain", "-uno", "--", "src", "benchmarks/*.py"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


FRAME = frame()
"""Taken when a run begins: the repository may move on meanwhile."""

"""What every kept figure says of itself: command, commit, device, date.

Owns: the frame of the JSON files under ``benchmarks/results``. Does not know: what was measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyradix.engine.bench import provenance

ROOT = Path(__file__).resolve().parent.parent


def frame() -> dict[str, Any]:
    """Where, when and by which command a figure is measured."""
    script, *arguments = sys.argv
    path = Path(script).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    device = f"{provenance.cpu_name()}, {_memory_gib()} GiB"
    return provenance.frame(["python", name, *arguments], device, sources="benchmarks/*.py")


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


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


FRAME = frame()
"""Taken when a run begins: the repository may move on meanwhile."""

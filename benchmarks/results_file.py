"""Where a figure comes from: what every file under ``benchmarks/results`` says about itself."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def provenance(command: str) -> dict[str, Any]:
    """Command, commit (``+`` after it: with uncommitted changes), device and date."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    is_dirty = bool(_git("status", "--porcelain", "--untracked-files=no", "--", "src"))
    return {
        "command": command,
        "commit": commit + ("+" if is_dirty else ""),
        "device": f"{_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write(name: str, source: dict[str, Any], figures: Any, text: str) -> None:
    """Write ``name``.json (raw figures) and ``name``.md (the table) with their source."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    raw = json.dumps({**source, "figures": figures}, indent=1)
    (RESULTS / f"{name}.json").write_text(raw + "\n")
    head = "\n".join(f"- {key}: `{value}`" for key, value in source.items())
    (RESULTS / f"{name}.md").write_text(f"{text.rstrip()}\n\n{head}\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

"""Where a figure comes from: what every file under ``benchmarks/results`` says about itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from hyradix.engine.bench.provenance import frame

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def provenance(command: str) -> dict[str, Any]:
    """Command, commit (and whether it was changed), device and date."""
    found = frame(shlex.split(command))
    kept = {name: found[name] for name in ("command", "commit", "device", "date")}
    return kept | {"python": found["software"]["python"]}


def write(name: str, source: dict[str, Any], figures: Any, text: str) -> None:
    """Write ``name``.json (raw figures) and ``name``.md (the table) with their source."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    raw = json.dumps({**source, "figures": figures}, indent=1)
    (RESULTS / f"{name}.json").write_text(raw + "\n")
    head = "\n".join(f"- {key}: `{value}`" for key, value in source.items())
    (RESULTS / f"{name}.md").write_text(f"{text.rstrip()}\n\n{head}\n")

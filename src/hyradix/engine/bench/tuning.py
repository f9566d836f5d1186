"""Which candidates of a static table were fastest, as rows to be written into it.

Owns: the rule by which a candidate wins. Does not know: kernels, clocks.
"""

from __future__ import annotations

from typing import Any

WITHIN = 1.02
"""A candidate stays on, from batch to batch, while it is within this of the fastest."""


def winners(timings: list[dict[str, Any]]) -> str:
    """By bench the candidates that were fastest, from which batch on: few rows, as text."""
    by_name: dict[str, dict[int, dict[str, float]]] = {}
    for timing in timings:
        if timing.get("us"):
            batches = by_name.setdefault(timing["name"], {})
            batches.setdefault(timing["batch"], {})[timing["config"]] = timing["us"]
    lines: list[str] = []
    for name, batches in by_name.items():
        rows = _rows(batches)
        lines += [f"{name}:", *rows] if rows else []
    return "\n".join(lines)


def _rows(batches: dict[int, dict[str, float]]) -> list[str]:
    rows: list[str] = []
    kept = ""
    for batch, found in sorted(batches.items()):
        candidates = {config: us for config, us in found.items() if config}
        if not candidates:
            continue
        best = min(candidates, key=lambda config: candidates[config])
        if candidates.get(kept, float("inf")) > WITHIN * candidates[best]:
            kept = best
            rows.append(f"        ({batch}, {best}),")
        rows[-1] += f"  # {batch}: {candidates[kept]:.1f} us, table {found.get('', 0.0):.1f}"
    return rows

"""Reports as pictures (PNG): decode beside its floor and what is to beat, kernels beside bandwidth.

Owns: how they look, and the one place that loads matplotlib (``hyradix[plot]``).
Does not know: how anything was measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from hyradix.errors import ConfigError

_PARTS = ("schedule", "submit", "wait", "commit", "other")
_LINES = (
    ("floor_ms", "floor (memory alone)", "black", "_"),
    ("peer_ms", "peer", "tab:red", "x"),
    ("target_ms", "target", "tab:orange", "v"),
    ("aim_ms", "aim", "tab:green", "^"),
)


def check_plot() -> None:
    """Raise ``ConfigError`` where no plot can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'hyradix[plot]'", param="plot")


def plot_engine(report: dict[str, Any], path: Path) -> None:
    """Milliseconds a step by batch and log, in parts; prefill and the cached prompt below."""
    rows = report["decode"]
    figure, axes = _axes(1, width=max(7.0, 1.4 * len(rows)))
    names = [_row_name(row) for row in rows]
    bottom = [0.0] * len(rows)
    for part in _PARTS:
        heights = [max(row[f"{part}_ms"], 0.0) for row in rows]
        axes.bar(names, heights, bottom=bottom, label=part, width=0.6)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for key, label, colour, marker in _LINES:
        points = [(i, row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=11)
    axes.set_ylabel("milliseconds a decode step")
    axes.set_title(f"{report['model']}, {report['device']}", fontsize=10)
    if rows:
        axes.legend(fontsize=8)
    notes = []
    if "prefill" in report:
        row = report["prefill"]
        beat = f" (peer {row['peer']:.0f}, target {row['target']:.0f})" if "peer" in row else ""
        notes.append(
            f"prefill {row['prompts']} x {row['length']}: {row['tokens_per_s']:.0f} tokens/s{beat}"
        )
    if "cached" in report:
        row = report["cached"]
        beat = f" (target {row['target_ratio']:.0f}x)" if "target_ratio" in row else ""
        notes.append(
            f"{row['length']} tokens, {row['cached_tokens']:.0f} cached: {row['cold_ms']:.0f} ms "
            f"cold, {row['cached_ms']:.0f} ms, {row['ratio']:.1f}x{beat}"
        )
    axes.set_xlabel("\n".join(["batch, rows of the state log", *notes]), fontsize=9)
    _save(figure, path)


def plot_kernels(report: dict[str, Any], path: Path) -> None:
    """Share of the measured bandwidth of a copy, a bar for each kernel and batch."""
    rows = [row for row in report["timings"] if "share" in row]
    figure, axes = _axes(1, width=9.0, height=max(3.0, 0.22 * len(rows) + 1.5))
    names = [f"{row['name']}, {row['batch']}" for row in rows]
    places = range(len(rows))
    axes.barh(places, [row["share"] for row in rows], height=0.7)
    axes.set_yticks(places, names, fontsize=7)
    for i, row in enumerate(rows):
        axes.text(row["share"], i, f" {row['us']:.1f} us", va="center", fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("bytes that must move / time, over the bandwidth of a copy")
    axes.set_title(report["device"], fontsize=10)
    _save(figure, path)


def _row_name(row: dict[str, Any]) -> str:
    log = row["decode_log"]
    return f"{row['batch']}" if log is None else f"{row['batch']}, {log or 'in place'}"


def _axes(count: int, *, width: float, height: float = 5.0) -> tuple[Any, Any]:
    """A figure that needs no screen."""
    check_plot()
    module = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(count)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="plot") from None

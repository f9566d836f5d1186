"""``hyradix bench kernels`` and ``hyradix bench engine``: what is measured on a device.

Owns: their options. Does not know: how anything is measured.
Invariant: torch is loaded when a command runs, not before (``--help`` does not need it).
Read next: ``engine/bench/kernels.py``, ``engine/bench/engine.py``.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hyradix.config import Settings
from hyradix.errors import ConfigError
from hyradix.server.launch import EXIT_FAILED
from hyradix.server.options import HELP, with_settings
from hyradix.server.spaced_lists import numbers

JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]
PlotPath = Annotated[
    Path | None, typer.Option("--plot", help="Draw it (PNG); needs the extra plot.")
]


def kernels(
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    only: Annotated[str, typer.Option(help="Sections, by comma or space.")] = "",
    batch: Annotated[str, typer.Option(help="Batch sizes. (default: all)")] = "",
    match: Annotated[str, typer.Option(help="Kernels whose name contains this.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds, compiling included.")] = 140.0,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the candidates of the static tables too.")
    ] = False,
    check_only: Annotated[bool, typer.Option("--check-only", help="Time nothing.")] = False,
    time_only: Annotated[bool, typer.Option("--time-only", help="Check nothing.")] = False,
    random_weights: Annotated[
        str | None,
        typer.Option(help="On the CPU: a config.json whose shape is used. (default: the demo's)"),
    ] = None,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """Check every kernel against float64, then time it: microseconds, bytes, share of bandwidth."""
    if check_only and time_only:
        raise ConfigError("--check-only and --time-only leave nothing to do", param="time_only")
    check_output(json_path, "json")
    check_output(plot, "plot")
    bench, plots = late("hyradix.engine.bench.commands"), late("hyradix.engine.bench.plot")
    if plot is not None:
        plots.check_plot()
    options = bench.KernelBenchOptions(
        device=device,
        only=tuple(word for word in only.replace(",", " ").split() if word),
        match=match,
        batches=numbers(batch, "batch", least=1),
        budget_s=budget,
        tune=tune,
        check_only=check_only,
        time_only=time_only,
    )
    report = bench.run_kernels(options, random_weights, sys.argv[1:])
    _keep(report, json_path, plot, plots.plot_kernels)
    if report["failed"] or not (report["checks"] or time_only):
        raise typer.Exit(EXIT_FAILED)


def _engine(
    settings: Settings,
    batch: Annotated[str, typer.Option(help="Decode batch sizes.")] = "1 8",
    prompt: Annotated[int, typer.Option(min=2, help="Prompt tokens of a decoding request.")] = 1024,
    output: Annotated[int, typer.Option(min=4, help="New tokens of a decoding request.")] = 256,
    decode_log: Annotated[
        str, typer.Option(help="Rows of the state log, an engine for each. (default: by device)")
    ] = "",
    prefill: Annotated[
        str | None, typer.Option(help="Prompts to prefill together, such as 8x8192.")
    ] = None,
    cached: Annotated[
        str | None,
        typer.Option(help="A prompt cold and with a cached beginning, such as 16000:15500."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 3,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """Decode, prefill and a cached prompt through the real engine, beside what memory allows."""
    check_output(json_path, "json")
    check_output(plot, "plot")
    bench, plots = late("hyradix.engine.bench.commands"), late("hyradix.engine.bench.plot")
    if plot is not None:
        plots.check_plot()
    options = bench.EngineBenchOptions(
        batches=numbers(batch, "batch", least=1),
        prompt=prompt,
        output=output,
        decode_logs=numbers(decode_log, "decode-log", least=0),
        prefill=_pair(prefill, "x", "prefill"),
        cached=_pair(cached, ":", "cached"),
        repeats=repeats,
    )
    report = bench.run_engine(settings, options, sys.argv[1:])
    _keep(report, json_path, plot, plots.plot_engine)


engine = partial(with_settings, without=("decode_log",))(_engine)
engine.__name__ = "engine"


def check_output(path: Path | None, option: str) -> None:
    """Raises ``ConfigError`` before anything is measured that could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--{option}: {path} is a directory", param=option)
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--{option}: there is no directory {path.parent}", param=option)


def late(name: str) -> Any:
    """A module that loads torch: the environment is prepared first, as for the engine process."""
    importlib.import_module("hyradix.runner.threads").prepare_environment()
    return importlib.import_module(name)


def _keep(report: dict[str, Any], json_path: Path | None, plot: Path | None, draw: Any) -> None:
    if json_path is not None:
        late("hyradix.engine.bench.provenance").write_json(json_path, report)
    if plot is not None:
        draw(report, plot)


def _pair(text: str | None, mark: str, option: str) -> tuple[int, int] | None:
    """``8x8192``. Raises ``ConfigError``."""
    if text is None:
        return None
    first, _, second = text.lower().partition(mark)
    if not (first.isdecimal() and second.isdecimal() and int(first) > 0 and int(second) > 0):
        example = "8x8192" if mark == "x" else "16000:15500"
        raise ConfigError(
            f"--{option} is two numbers such as {example}, got {text!r}", param=option
        )
    return int(first), int(second)

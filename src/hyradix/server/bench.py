"""``hyradix bench``: measurements that need no server.

Owns: its commands and their options. Does not know: how anything is measured.
Read next: ``bench_device.py`` (those that load torch), ``engine/bench_cache.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hyradix.config import Settings
from hyradix.engine.bench_cache import BenchOptions, bench_cache
from hyradix.engine.bench_workload import TRACE_LIMIT, read_workload
from hyradix.engine.loading_bar import LoadingBar
from hyradix.errors import ConfigError
from hyradix.server import bench_device
from hyradix.server.bench_device import check_output
from hyradix.server.options import HELP, parse_on_off
from hyradix.server.spaced_lists import SpacedLists

app = typer.Typer(name="bench", no_args_is_help=True, help="Measure parts of Hyradix.")

_DEFAULTS = Settings()


app.command(cls=SpacedLists)(bench_device.kernels)
app.command(cls=SpacedLists)(bench_device.engine)


@app.command()
def cache(
    file: Annotated[
        Path, typer.Argument(help="A workload (JSON lines) or a trace of block hashes; may be gz.")
    ],
    kv_slots: Annotated[int, typer.Option(help="KV slots in the pool; 0: unlimited.")],
    states: Annotated[
        int, typer.Option(help="State slots, the running requests' included; 0: unlimited.")
    ],
    policy: Annotated[str, typer.Option(help=HELP["policy"])] = _DEFAULTS.policy,
    concurrency: Annotated[int, typer.Option(help="Requests in the system at any time.")] = 1,
    seed: Annotated[int, typer.Option(help="Decides the replies of a trace.")] = 1,
    limit: Annotated[
        int | None,
        typer.Option(help=f"Requests taken. (default: {TRACE_LIMIT} of a trace, else all)"),
    ] = None,
    marks: Annotated[
        Any,
        typer.Option(parser=parse_on_off, metavar="on|off", help="Use the workload's boundaries."),
    ] = "on",
    min_gain: Annotated[int, typer.Option(help=HELP["min_gain"])] = _DEFAULTS.min_gain,
    max_checkpoints: Annotated[
        int, typer.Option(help=HELP["max_checkpoints"])
    ] = _DEFAULTS.max_checkpoints,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
) -> None:
    """Replay a workload through the scheduler and the prefix cache alone, in virtual time."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be positive, got {limit}", param="limit")
    if seed < 0:
        raise ConfigError(f"--seed must not be negative, got {seed}", param="seed")
    check_output(json_path, "json")
    options = BenchOptions(
        kv_slots=kv_slots,
        states=states,
        policy=policy,
        concurrency=concurrency,
        use_marks=marks,
        min_gain=min_gain,
        max_checkpoints=max_checkpoints,
    )
    with LoadingBar(is_shown=sys.stderr.isatty()) as bar:
        workload = read_workload(file, seed=seed, limit=limit)
        total = len(workload)
        report = bench_cache(
            workload, options, on_progress=lambda done: bar.update("Requests", done, total)
        )
    print("\n".join(summary(report)))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps({"file": file.name, "seed": seed, **report}, indent=1))
        except OSError as error:
            raise ConfigError(f"cannot write {json_path}: {error.strerror}", param="json") from None


def summary(report: dict[str, Any]) -> list[str]:
    """A report as lines of text."""
    peak, evictions = report["peak"], report["evictions"]
    lines = [
        f"hit ratio {report['hit_ratio']:.4f}: {report['cached_tokens']:,} of "
        f"{report['prompt_tokens']:,} prompt tokens in {report['requests']:,} requests",
        f"peak      {peak['kv']:,} KV slots, {peak['states']:,} states",
        f"evicted   {evictions['kv']:,} KV slots, {evictions['states']:,} states; "
        f"{report['preemptions']:,} preemptions",
        "reasons   " + ", ".join(f"{k} {v:,}" for k, v in report["miss_reasons"].items()),
        "operation        p50        p99 us",
    ]
    for name, times in report["op_us"].items():
        p50, p99 = ("-" if v is None else f"{v:.1f}" for v in (times["p50"], times["p99"]))
        lines.append(f"{name:12s} {p50:>7s} {p99:>10s}")
    return lines

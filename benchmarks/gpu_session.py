"""Everything that one GPU must show, in stages, under a budget of time.

    python benchmarks/gpu_session.py --out OUT [--budget 1500] [--stages kernel_checks decode ...]
        [--device cpu --tiny]

Each stage is a process with a limit of its own (``gpu_stages.py``); one that fails or runs out of
time takes nothing from the others. After every stage OUT holds ``session.json`` (its figures, and
the whole reports of the stages), ``session.log`` (what they printed) and the plots: four files.
A run over an OUT that is there leaves out what is done, unless ``--stages`` names it. ``--device
cpu --tiny`` tries the plumbing where there is no GPU. Exits with 1 where a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.figures import FRAME  # noqa: E402
from benchmarks.gpu_stages import Place, Stage, environment, stages  # noqa: E402

LEAST_S = 15.0
"""With less left than this, a stage is not begun."""
LOG_BYTES = 2 << 20
"""Of one stage's output, its end."""


def run_limited(
    command: list[str], environment: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """The exit code (None: over its limit, which ends its whole group of processes), and the end
    of what it printed."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, 0))
        return code, log.read().decode(errors="replace")


def run_stage(stage: Stage, limit_s: float) -> tuple[dict[str, Any], str]:
    """Its entry, and what it printed."""
    started = time.monotonic()
    assert stage.command is not None
    code, output = run_limited(stage.command, environment(stage), limit_s)
    status = {0: "ok", None: f"over its limit of {limit_s:.0f} s"}.get(code, f"failed ({code})")
    entry: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    try:
        entry["figures"] = stage.read(output)
    except (OSError, ValueError, KeyError, IndexError) as error:
        entry["figures"] = {}
        entry["unread"] = repr(error)
        if status == "ok":
            entry["status"] = "its result cannot be read"
    entry["command"] = " ".join(stage.command)
    return entry, output


class Session:
    """The folder of results, written anew after every stage."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._path = place.out / "session.json"
        self._log = place.out / "session.log"
        self.entries: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self.entries = json.loads(self._path.read_text())["stages"]

    def add(self, stage: Stage, entry: dict[str, Any], output: str) -> None:
        """Keep what a stage brought, its whole report too."""
        report = self._place.scratch / f"{stage.name}.json"
        if report.exists():
            entry["report"] = json.loads(report.read_text())
        self.entries[stage.name] = entry
        with self._log.open("a") as log:
            log.write(f"\n===== {stage.name}: {entry['status']} =====\n{output}")
        whole = {**FRAME, "target": self._place.device, "stages": self.entries}
        self._path.write_text(json.dumps(whole, indent=1) + "\n")


def table(entries: dict[str, dict[str, Any]]) -> str:
    """A line for each stage."""
    lines = [f"{'stage':14} {'seconds':>7}  status and figures"]
    for name, entry in entries.items():
        figures = json.dumps(entry["figures"]) if entry["figures"] else ""
        lines.append(f"{name:14} {entry['seconds']:7.1f}  {entry['status']} {figures[:400]}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds of all stages")
    parser.add_argument("--stages", nargs="*", help="default: all that are not done")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: to try the plumbing")
    args = parser.parse_args(arguments)
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_session_") as scratch:
        place = Place(args.device, args.tiny, Path(scratch), args.out.resolve())
        session, known = Session(place), {stage.name: stage for stage in stages(place)}
        done = {name for name, entry in session.entries.items() if entry["status"] == "ok"}
        wanted = args.stages or [name for name in known if name not in done]
        unknown = [name for name in wanted if name not in known]
        if unknown:
            parser.error(f"no stage {unknown[0]}; there are: {', '.join(known)}")
        for name in wanted:
            stage, left = known[name], args.budget - (time.monotonic() - started)
            entry: dict[str, Any] = {"seconds": 0.0, "figures": {}}
            output = ""
            if stage.command is None:
                entry["status"] = f"skipped: {stage.skipped}"
            elif left < LEAST_S:
                entry["status"] = "skipped: the budget is over"
            else:
                entry, output = run_stage(stage, min(stage.limit_s, left))
            session.add(stage, entry, output)
            print(table({name: entry}).splitlines()[-1], flush=True)
    print("\n" + table(session.entries))
    bad = [x for x in session.entries.values() if not x["status"].startswith(("ok", "skipped"))]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

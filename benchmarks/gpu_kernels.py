"""Every Triton kernel on one GPU: checked against float64, then timed at the 4b shape.

    PYTHONPATH=src python benchmarks/gpu_kernels.py --json $OUT/gpu_kernels.json

First a process per section compiles and checks (their kernels land in Triton's cache), then this
process times by graph replay, one bench after the other, until ``--budget`` seconds are over.
Exit status 1 where a check failed. ``--tune`` times the candidates of the static table too, and
prints the rows that won: for the decode steps, in about two minutes,

    PYTHONPATH=src python benchmarks/gpu_kernels.py --tune --only recurrent --match "gdn step" \\
        --no-check --budget 200

``--compile-only`` needs no device: it compiles for sm_90 and
prints registers, spills and shared memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.figures import save  # noqa: E402
from benchmarks.gpu.bench import BANDWIDTH, Bench, time_bench  # noqa: E402

SECTIONS = (
    "recurrent", "keeping", "attention", "dense", "rules", "prefill", "families", "experts",
)  # fmt: skip


def main() -> int:
    options = _options()
    started = time.monotonic()
    if options.compile_only:
        return _compile_only(options)
    if options.worker:
        return _worker(options)
    checks = _run_workers(options)
    failed = [x for x in checks if not x["ok"]]
    timings = [] if options.check_only else _time(options, started)
    for x in failed:
        print(f"FAILED {x['name']}: {x['error']}", flush=True)
    print(f"{len(checks)} checks, {len(failed)} failed, {time.monotonic() - started:.0f} s")
    if options.tune:
        print(winners(timings), flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        figures = {"gpu": device, "checks": checks, "timings": timings}
        save(options.json, figures)
    return 1 if failed or not (checks or options.no_check) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="sections, by comma")
    parser.add_argument("--match", default="", help="benches whose name contains this")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds, compiling included")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _sections(options: argparse.Namespace) -> list[str]:
    wanted = [name for name in options.only.split(",") if name]
    return [name for name in SECTIONS if not wanted or name in wanted]


def _benches(name: str, options: argparse.Namespace, device: torch.device) -> list[Bench]:
    section = import_module(f"benchmarks.gpu.{name}")
    found = section.benches(device, tune=options.tune)
    return [bench for bench in found if options.match in bench.name]


def _run_workers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks of all sections, each in a process that also compiles what will be timed.

    With ``--tune`` several processes share a section's kernels; the first does the checks.
    """
    workers = {
        (name, part): subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", name, "--part", str(part)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in _sections(options)
        for part in range(_parts(options))
    }
    checks: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget
    for (name, _), worker in workers.items():
        try:
            output, _ = worker.communicate(timeout=max(deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            worker.kill()
            output, _ = worker.communicate()
        lines = [line for line in output.splitlines() if line.startswith('{"name"')]
        checks += [json.loads(line) for line in lines]
        if worker.returncode:
            checks.append({"name": f"section {name}", "error": "it broke off", "ok": False})
    return checks


def _parts(options: argparse.Namespace) -> int:
    """Processes of a section: as many as the machine compiles at once."""
    if not options.tune:
        return 1
    return max(1, min(8, ((os.cpu_count() or 1) - 1) // len(_sections(options))))


def _to_compile(options: argparse.Namespace, device: torch.device) -> list[Bench]:
    """One bench for each kernel and candidate that is this worker's; batches share a kernel."""
    first: dict[tuple[str, str], Bench] = {}
    for bench in _benches(options.worker, options, device):
        key = (bench.name, str(bench.config)) if options.tune else (bench.name, str(len(first)))
        first.setdefault(key, bench)
    return list(first.values())[options.part :: _parts(options)]


def _worker(options: argparse.Namespace) -> int:
    """Print the checks, one JSON object a line; run every bench once, on one input set."""
    device, status = torch.device("cuda"), 0
    section = import_module(f"benchmarks.gpu.{options.worker}")
    has_checks = options.part == 0 and not options.no_check
    try:
        for check in section.checks(device) if has_checks else ():
            found = {"name": check.name, "error": check.error, "limit": check.limit}
            print(json.dumps({**found, "ok": check.is_ok}), flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    for bench in [] if options.check_only else _to_compile(options, device):
        try:
            bench.build(1)[0]()
            torch.cuda.synchronize()
        except Exception:
            print(f"bench {bench.name} {bench.batch} {bench.note}", file=sys.stderr)
            traceback.print_exc()
            status = 1
        gc.collect()
        torch.cuda.empty_cache()
    return status


def _time(options: argparse.Namespace, started: float) -> list[dict[str, Any]]:
    print(f"{'kernel':34} {'batch':>5} {'us':>9} {'share of 4.28 TB/s':>18}  TFLOP/s")
    results: list[dict[str, Any]] = []
    for name in _sections(options):
        for bench in _benches(name, options, torch.device("cuda")):
            if time.monotonic() - started > options.budget:
                results.append({"name": bench.name, "batch": bench.batch, "skipped": True})
                continue
            try:
                seconds = time_bench(bench)
            except Exception as error:
                print(f"{bench.name} {bench.batch}: {error!r}"[:200], flush=True)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            share = bench.num_bytes / seconds / BANDWIDTH
            tera = bench.flops / seconds * 1e-12
            print(
                f"{bench.name:34} {bench.batch:5} {seconds * 1e6:9.1f} {share:18.2f}  "
                f"{tera or '':5.5} {bench.note}",
                flush=True,
            )
            results.append(
                {
                    "name": bench.name, "batch": bench.batch, "us": seconds * 1e6,
                    "bytes": bench.num_bytes, "share": share, "flops": bench.flops,
                    "note": bench.note, "config": str(bench.config or ""),
                }
            )  # fmt: skip
    return results


def winners(timings: list[dict[str, Any]]) -> str:
    """Rows for the static table: by bench, the candidates that were fastest, from which batch on.

    A candidate stays on while it is within 2 % of the fastest, so that rows are few.
    """
    by_name: dict[str, dict[int, dict[str, float]]] = {}
    for x in timings:
        if x.get("us"):
            by_name.setdefault(x["name"], {}).setdefault(x["batch"], {})[x["config"]] = x["us"]
    lines = []
    for name, batches in by_name.items():
        rows: list[str] = []
        kept = ""
        for batch, found in sorted(batches.items()):
            candidates = {config: us for config, us in found.items() if config}
            if not candidates:
                continue
            best = min(candidates, key=lambda config: candidates[config])
            if candidates.get(kept, float("inf")) > 1.02 * candidates[best]:
                kept = best
                rows.append(f"        ({batch}, {best}),")
            rows[-1] += f"  # {batch}: {candidates[kept]:.1f} us, table {found.get('', 0.0):.1f}"
        lines += [f"{name}:", *rows] if rows else []
    return "\n".join(lines)


def _compile_only(options: argparse.Namespace) -> int:
    from benchmarks.triton_offline import compiled_for

    seen = set()
    print("kernel, warps: registers, local bytes, shared bytes (sm_90)")
    for name in _sections(options):
        for bench in _benches(name, options, torch.device("meta")):
            with compiled_for(90) as found:
                bench.build(1)[0]()
            for x in found:
                key = (x.name, x.num_warps, x.registers, x.local_bytes, x.shared_bytes, bench.name)
                if key not in seen:
                    seen.add(key)
                    print(f"{bench.name:34} {bench.batch:5} {x.name:22} {x.num_warps:2}: "
                          f"{x.registers:4} {x.local_bytes:5} {x.shared_bytes:7} {bench.note}",
                          flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What ``gpu_session.py`` runs, stage by stage: a command, its limit, and how its result is read.

Owns: the stages and their order. Does not know: budgets, processes, files but those that a stage
writes into the folder it is given.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
HYRADIX = [PYTHON, "-m", "hyradix"]
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
SHAPE = "benchmarks/configs/shape-4b.json"
TINY = "benchmarks/configs/cpu25m.json"
HOTTEST = (
    ("recurrent", "gdn step, log of 8", 64),
    ("dense", "product, gate, up", 8),
    ("attention", "attention, decode behind 1152", 64),
)
"""Section, bench and batch of what takes most of a decode step of the 4b shape."""
NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.3}
"""Gaps between two logprobs of the demo model that rounding may turn over: activations of bfloat16
move a gap by 0.04 in the median and by up to 0.24 (48 positions, against float32 ones)."""
NCU_SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats",
)  # fmt: skip
NCU_METRICS = {
    "Duration": "duration", "DRAM Throughput": "dram_percent", "Memory Throughput": "memory",
    "Compute (SM) Throughput": "sm_percent", "L2 Cache Throughput": "l2_percent",
    "Achieved Occupancy": "occupancy_percent", "Registers Per Thread": "registers",
    "Block Limit Registers": "limit_registers", "Block Limit Shared Mem": "limit_shared",
    "Warp Cycles Per Issued Instruction": "cycles_per_issue", "Waves Per SM": "waves",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where stages run: ``device``, small or whole, and the folder for what they write."""

    device: str
    is_tiny: bool
    scratch: Path
    out: Path

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Stage:
    """command: None: ``skipped`` says why. read: the figures, from its JSON or its output."""

    name: str
    limit_s: float
    command: list[str] | None = None
    skipped: str = ""
    read: Callable[[str], dict[str, Any]] = lambda output: {}
    environment: dict[str, str] = field(default_factory=dict)


def stages(place: Place) -> list[Stage]:
    """All of them, in the order of their use: what is cheap and decides comes first."""
    return [
        _kernel_checks(place),
        _o1(place, "o1_float32", "float32", NEAR_TIES["float32"]),
        _start(place),
        _decode(place),
        _prefill(place),
        _memory(place),
        _kernel_times(place),
        *[_tests(place, name) for name in GPU_TESTS],
        _o1(place, "o1_bfloat16", "bfloat16", NEAR_TIES["bfloat16"]),
        _http(place),
        *[_ncu(place, i) for i in range(len(HOTTEST))],
        _sanitizer(place),
    ]


# ---- kernels ---------------------------------------------------------------------------------


def _kernel_checks(place: Place) -> Stage:
    command = [*HYRADIX, "bench", "kernels", "--device", place.device, "--check-only"]
    return _with_json(place, "kernel_checks", 300, [*command, "--budget", "280"], _kernels)


def _kernel_times(place: Place) -> Stage:
    command = [*HYRADIX, "bench", "kernels", "--device", place.device, "--time-only"]
    command += ["--batch", "1"] if place.is_tiny else ["--budget", "280"]
    command += ["--plot", str(place.out / "kernels.png")]
    return _with_json(place, "kernel_times", 300, command, _kernels)


def _kernels(report: dict[str, Any]) -> dict[str, Any]:
    times = {f"{x['name']}, {x['batch']}": x for x in report["timings"] if "us" in x}
    top = sorted(times.items(), key=lambda pair: -pair[1]["us"])[:3]
    return {
        "checks": len(report["checks"]),
        "failed": report["failed"],
        "timed": len(times),
        **{f"us of {name}": round(x["us"], 1) for name, x in top},
    }


# ---- correctness -----------------------------------------------------------------------------


GPU_TESTS = {
    "kernel_tests": ("tests/kernels/triton_kernels", "tests/runner"),
    "families": ("tests/gpu",),
    "conformance": ("tests/conformance",),
    "o1_families": ("tests/oracles",),
}
"""Where tests marked gpu are, by stage."""


def _tests(place: Place, name: str) -> Stage:
    """Tests that need a device."""
    if not place.is_gpu:
        return Stage(name, 0, skipped="needs a GPU")
    command = [*PYTEST, "-m", "gpu", *_parallel(), *GPU_TESTS[name]]
    return Stage(name, 180, command, read=_pytest)


def _parallel() -> list[str]:
    """Most of the time kernels are compiled, and a process that loses its device is started anew.
    pytest-benchmark warns of processes, which is an error."""
    if importlib.util.find_spec("xdist") is None:
        return []
    processes = max(1, (os.cpu_count() or 1) - 2)
    return ["-n", str(processes), "--dist", "worksteal", "-p", "no:benchmark"]


def _o1(place: Place, name: str, dtype: str, near_tie: float) -> Stage:
    """On a GPU as it serves, with preemptions; against the CPU's runs too."""
    count = 1 if place.is_tiny else 8
    command = [PYTHON, "-m", "tests.oracles.schedules", "--schedules", str(count)]
    command += ["--device", place.device, "--dtype", dtype, "--near-tie", str(near_tie)]
    if place.is_gpu:
        command += ["--overlap", "--decode-log", "16", "--force-preempt-every", "11"]
    return _with_json(place, name, 240, command, _o1_figures)


def _o1_figures(report: dict[str, Any]) -> dict[str, Any]:
    counts = {name: report[name] for name in ("requests", "prompt_tokens", "cached_tokens")}
    counts["preemptions"] = report["preemptions"]
    ties, failures = report["near_ties"], report["failures"]
    listed = {"listed": ties[:20], "failed": failures[:20]}
    return {**counts, "near_ties": len(ties), "failures": len(failures), **listed}


def _pytest(output: str) -> dict[str, Any]:
    """The counts of pytest's last line."""
    last = [line for line in output.splitlines() if " in " in line and line.rstrip()[-1:] in "s=)"]
    words = last[-1].replace(",", "").split() if last else []
    return {words[i + 1]: int(words[i]) for i in range(len(words) - 1) if words[i].isdecimal()}


def _sanitizer(place: Place) -> Stage:
    if not place.is_gpu or shutil.which("compute-sanitizer") is None:
        return Stage("sanitizer", 0, skipped="needs a GPU and compute-sanitizer")
    command = [PYTHON, "benchmarks/gpu_memcheck.py"]
    return _with_json(place, "sanitizer", 240, command, _memcheck)


def _memcheck(report: dict[str, Any]) -> dict[str, Any]:
    """Tests and bad accesses of the files that ended, and which did not."""
    ended = [x for x in report["files"].values() if x["errors"] is not None]
    figures = {name: sum(x[name] for x in ended) for name in ("passed", "failed", "errors")}
    return figures | {"not ended": [n for n, x in report["files"].items() if x["errors"] is None]}


# ---- the engine ------------------------------------------------------------------------------


def _engine(place: Place, *options: str) -> list[str]:
    config = TINY if place.is_tiny else SHAPE
    dtype = ["--dtype", "bfloat16"] if place.is_gpu else []
    overlap = ["--overlap", "on"] if place.is_gpu else []
    shared = ["--random-weights", config, "--device", place.device, *dtype, *overlap]
    return [*HYRADIX, "bench", "engine", *shared, *options]


def _start(place: Place) -> Stage:
    """From nothing: no kernel was compiled on this machine yet."""
    sizes = "--batch 1 --prompt 12 --output 8 --repeats 1"
    environment = {"TRITON_CACHE_DIR": str(place.scratch / "empty_cache")}
    stage = _with_json(place, "start", 120, _engine(place, *sizes.split()), _start_figures)
    return replace(stage, environment=environment)


def _start_figures(report: dict[str, Any]) -> dict[str, Any]:
    (start,) = report["start"].values()
    return {"process_to_ready_s": report["process_to_ready_s"], **start["stages_s"]}


def _memory(place: Place) -> Stage:
    if not place.is_gpu:
        return Stage("memory", 0, skipped="needs a GPU")
    command = [PYTHON, "benchmarks/gpu_memory.py", "--shape", SHAPE]
    return _with_json(place, "memory", 120, command, lambda report: dict(report["results"]))


def _decode(place: Place) -> Stage:
    sizes = "--batch 1 8 64 256 --prompt 1024 --output 256 --decode-log 0 16 --repeats 2"
    if place.is_tiny:
        sizes = "--batch 1 2 --prompt 12 --output 8 --decode-log 0 --repeats 1"
    command = [*_engine(place, *sizes.split()), "--plot", str(place.out / "decode.png")]
    return _with_json(place, "decode", 420, command, _decode_figures)


def _decode_figures(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"ready_s": [x["ready_s"] for x in report["start"].values()]}
    for row in report["decode"]:
        name = f"ms at {row['batch']}, log {row['decode_log']}"
        found[name] = [row["ms_per_step"], row["floor_ms"], row.get("target_ms")]
    return found


def _prefill(place: Place) -> Stage:
    sizes = "--batch= --prefill 8x8192 --cached 16000:15500 --repeats 5"
    if place.is_tiny:
        sizes = "--batch= --prefill 2x64 --cached 200:160 --repeats 1"
    return _with_json(place, "prefill", 240, _engine(place, *sizes.split()), _prefill_figures)


def _prefill_figures(report: dict[str, Any]) -> dict[str, Any]:
    cached = {name: report["cached"][name] for name in ("cold_ms", "cached_ms", "ratio")}
    return {"tokens_per_s": report["prefill"]["tokens_per_s"], **cached}


def _http(place: Place) -> Stage:
    load = "--requests 256 --scale 0.5 --longest 16384 --concurrency 64"
    serve = ["--random-weights", SHAPE, "--dtype", "bfloat16", "--overlap", "on"]
    if place.is_tiny:
        load = "--requests 4 --scale 0.01 --longest 256 --concurrency 2"
        serve = ["--max-requests", "2", "--kv-slots", "4096", "--states", "16"]
    serve += ["--device", place.device, "--log-level", "warning"]
    path = place.scratch / "http.json"
    command = [PYTHON, "benchmarks/serve_load.py", *load.split(), "--json", str(path), "--", *serve]
    return Stage("http", 240, command, read=lambda _: _http_figures(_json(path)["results"]))


def _http_figures(results: dict[str, Any]) -> dict[str, Any]:
    names = ("failures", "output_tokens_per_s", "first_token_ms", "inter_token_ms")
    return {name: results[name] for name in names}


# ---- the profiler ----------------------------------------------------------------------------


def _ncu(place: Place, index: int) -> Stage:
    section, bench, batch = HOTTEST[index]
    name, tool = f"ncu_{index + 1}", shutil.which("ncu")
    if not place.is_gpu or tool is None:
        return Stage(name, 0, skipped="needs a GPU and ncu")
    command = [tool, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += [word for x in NCU_SECTIONS for word in ("--section", x)]
    command += [PYTHON, "benchmarks/gpu_one.py", section, bench, str(batch)]
    return Stage(
        name, 120, command, read=lambda output: {"bench": f"{bench}, {batch}"} | ncu(output)
    )


def ncu(output: str) -> dict[str, Any]:
    """Of each kernel its last launch: time, shares of what the device can do, what limits it."""
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return {"error": "no table in ncu's output"}
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        if not (row["ID"] or "").isdecimal():
            continue  # what the program printed itself
        kernel = kernels.setdefault(row["Kernel Name"], {})
        known = NCU_METRICS.get(row.get("Metric Name") or "")
        if known is not None:
            unit = row.get("Metric Unit") or ""
            kernel[f"{known} {unit}".strip()] = row["Metric Value"]
        if (row.get("Rule Type") or "") in ("OPT", "WRN", "INF") and row.get("Rule Description"):
            kernel.setdefault("limits", {})[row["Rule Name"]] = row["Rule Description"][:300]
    return {"kernels": kernels}


# ---- shared ----------------------------------------------------------------------------------


def _with_json(
    place: Place, name: str, limit_s: float, command: list[str],
    read: Callable[[dict[str, Any]], dict[str, Any]],
) -> Stage:  # fmt: skip
    """A stage whose command takes ``--json``."""
    path = place.scratch / f"{name}.json"
    return Stage(name, limit_s, [*command, "--json", str(path)], read=lambda _: read(_json(path)))


def _json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def environment(stage: Stage) -> dict[str, str]:
    """Of its process: it finds the package and the tests."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **stage.environment}

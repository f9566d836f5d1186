"""The sections of kernels that are benched: which there are, and their checks in processes.

A GPU's sections are the modules of ``benchmarks/gpu`` in a checkout: their checks are built from
the tests' cases, which no installation has. Each is checked in a process of its own, all at the
same time, which also compiles what will be timed (into Triton's cache); where candidates are tuned,
several processes share a section's kernels, and the first does the checks.

Owns: ``KernelBenchOptions``, finding and loading sections, these processes (this module is what
they run). Does not know: how time is taken, reports.
Read next: ``kernels.py``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, cast

import torch

from hyradix.engine.bench.cases import Bench, Check, Section
from hyradix.engine.bench.provenance import ROOT
from hyradix.errors import ConfigError

GPU_SECTIONS = "benchmarks/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchOptions:
    """only: sections. match: part of a bench's name. batches: all where empty."""

    device: str
    only: tuple[str, ...] = ()
    match: str = ""
    batches: tuple[int, ...] = ()
    budget_s: float = 140.0
    tune: bool = False
    check_only: bool = False
    time_only: bool = False

    def takes(self, bench: Bench) -> bool:
        """Whether it is asked for."""
        is_size = not self.batches or bench.batch in self.batches
        return is_size and self.match in bench.name


def section_names(options: KernelBenchOptions, device: torch.device) -> list[str]:
    """Sections there are, those asked for. Raises ``ConfigError`` for an unknown one."""
    known = ["compiled"] if device.type == "cpu" else _gpu_sections()
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise ConfigError(
            f"--only {unknown[0]}: sections on {device.type} are {', '.join(known)}", param="only"
        )
    return [name for name in known if not options.only or name in options.only]


def _gpu_sections() -> list[str]:
    folder = ROOT / GPU_SECTIONS
    if not folder.is_dir():
        raise ConfigError(
            f"the GPU's kernel benches are in {GPU_SECTIONS} of a checkout, which is not here",
            param="device",
        )
    files = sorted(folder.glob("*.py"))
    return [path.stem for path in files if "\ndef benches(" in path.read_text()]


def load_section(name: str) -> Section:
    """A GPU's section; it finds the tests' cases."""
    for path in (str(ROOT), str(ROOT / "src")):
        if path not in sys.path:
            sys.path.insert(0, path)
    return cast(Section, import_module(f"{GPU_SECTIONS.replace('/', '.')}.{name}"))


def as_json(check: Check) -> dict[str, Any]:
    """A check as the report has it."""
    found = {"name": check.name, "error": check.error, "limit": check.limit}
    return {**found, "ok": bool(check.is_ok)}


def checks_in_processes(names: list[str], options: KernelBenchOptions) -> list[dict[str, Any]]:
    """Of all sections; one that breaks off or outlasts the budget is a failed check."""
    path = os.pathsep.join(x or os.getcwd() for x in sys.path)
    parts = _num_parts(options, len(names))
    workers = {
        (name, part): subprocess.Popen(
            [sys.executable, "-m", __name__, name, json.dumps(asdict(options)), f"{part}/{parts}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for name in names
        for part in range(parts)
    }
    checks: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget_s
    for (name, _), worker in workers.items():
        try:
            output, _ = worker.communicate(timeout=max(deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            worker.kill()
            output, _ = worker.communicate()
        lines = [line for line in output.splitlines() if line.startswith('{"name"')]
        checks += [json.loads(line) | {"section": name} for line in lines]
        if worker.returncode:
            checks.append({"name": f"section {name}", "error": "it broke off", "ok": False})
    return checks


def _num_parts(options: KernelBenchOptions, num_sections: int) -> int:
    """Processes of a section: as many as the machine compiles at once."""
    if not options.tune or options.check_only:
        return 1
    return max(1, min(8, ((os.cpu_count() or 1) - 1) // max(num_sections, 1)))


def _to_compile(section: Section, options: KernelBenchOptions, device: torch.device) -> list[Bench]:
    """One bench of each kernel; of a candidate, batches of one note share one."""
    first: dict[tuple[str, str], Bench] = {}
    for bench in filter(options.takes, section.benches(device, tune=options.tune)):
        label = f"{bench.config} {bench.note}" if options.tune else str(len(first))
        first.setdefault((bench.name, label), bench)
    return list(first.values())


def run_section(name: str, options: KernelBenchOptions, part: int = 0, parts: int = 1) -> int:
    """Print the checks, one JSON object a line; run every bench once, on one input set."""
    section, status, device = load_section(name), 0, torch.device(options.device)
    has_checks = part == 0 and not options.time_only
    try:
        for check in section.checks(device) if has_checks else ():
            print(json.dumps(as_json(check)), flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    benches = [] if options.check_only else _to_compile(section, options, device)
    for bench in benches[part::parts]:
        try:
            bench.build(1)[0]()
            torch.cuda.synchronize()  # a fault shows here
        except Exception:
            print(f"bench {bench.name} {bench.batch} {bench.note}", file=sys.stderr)
            traceback.print_exc()
            status = 1
        gc.collect()
        torch.cuda.empty_cache()
    return status


if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    tuples = {key: tuple(fields[key]) for key in ("only", "batches")}
    share = (int(number) for number in sys.argv[3].split("/"))
    sys.exit(run_section(sys.argv[1], KernelBenchOptions(**fields | tuples), *share))

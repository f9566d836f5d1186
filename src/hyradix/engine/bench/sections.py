"""The sections of kernels that are benched: which there are, and their checks in processes.

A GPU's sections are the modules of ``benchmarks/gpu`` in a checkout: their checks are built from
the tests' cases, which no installation has. Processes, as many as there are cores, check them all
at the same time: each takes groups of checks that no other has taken, first from a section of its
own. One or more of each section then compile what will be timed, into Triton's cache.

Owns: ``KernelBenchOptions``, finding and loading sections, these processes (this module is what
they run). Does not know: how time is taken, reports.
Invariant: a group is taken once, and by whoever takes it computed from the same random numbers.
Read next: ``kernels.py``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from hyradix.engine.bench.cases import Bench, Check, Checks, Section
from hyradix.engine.bench.provenance import ROOT
from hyradix.errors import ConfigError

GPU_SECTIONS = "benchmarks/gpu"
MOST_PROCESSES = 16
"""Each holds some 0.5 GB of the device, and what its group needs."""


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
    """Of all sections; a process that breaks off or outlasts the budget is a failed check."""
    checks: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory(prefix="checks_") as taken:
        for own, worker in _start(names, options, taken):
            reason = "it broke off, exit code {code}, in {group}"
            try:
                output, _ = worker.communicate(timeout=max(deadline - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                reason = f"over its budget of {options.budget_s:.0f} s, in {{group}}"
                worker.kill()
                output, _ = worker.communicate()
            said = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
            checks += [line for line in said if "name" in line]
            if worker.returncode:
                last = next((x for x in reversed(said) if "begun" in x), None)
                found = last or {"section": own, "begun": "nothing yet"}
                error = reason.format(code=worker.returncode, group=found["begun"])
                checks.append({"name": f"section {found['section']}", "error": error, "ok": False})
    return checks


def _start(
    names: list[str], options: KernelBenchOptions, taken: str
) -> list[tuple[str, subprocess.Popen[str]]]:
    """All processes, each with its own section. taken: a folder, where they say which groups they
    took."""
    cores, path = os.cpu_count() or 1, os.pathsep.join(x or os.getcwd() for x in sys.path)
    parts = _num_parts(options, len(names))
    count = parts * len(names)
    if not options.time_only:
        count = max(count, min(cores, MOST_PROCESSES))
    threads = str(max(1, cores // max(count, 1)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
    given = [json.dumps(asdict(options)), taken]
    workers = []
    for i in range(count):
        order = names[i % len(names) :] + names[: i % len(names)]
        share = f"{i // len(names)}/{parts}"
        worker = subprocess.Popen(
            [sys.executable, "-m", __name__, *given, share, *order],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        workers.append((order[0], worker))
    return workers


def _num_parts(options: KernelBenchOptions, num_sections: int) -> int:
    """Processes that compile what a section times."""
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


def run_sections(
    names: list[str], options: KernelBenchOptions, taken: Path, part: int = 0, parts: int = 1
) -> int:
    """What one process does: checks that nobody took yet, of the first section first; then every
    bench of its part of the first section once, on one input set. Prints JSON, an object a line.

    Returns: the exit code.
    """
    device, own = torch.device(options.device), load_section(names[0])
    status = 0
    try:
        for name in () if options.time_only else names:
            for group in _free_groups(name, own if name == names[0] else None, device, taken):
                _say(section=name, begun=group.name)
                _run_group(name, group)
                _drop_memory()
    except Exception:
        traceback.print_exc()
        status = 1
    benches = [] if options.check_only else _to_compile(own, options, device)
    for bench in benches[part::parts] if part < parts else ():
        _say(section=names[0], begun=f"bench {bench.name} {bench.batch} {bench.note}")
        try:
            bench.build(1)[0]()
            torch.cuda.synchronize()  # a fault shows here
        except Exception:
            print(f"bench {bench.name} {bench.batch} {bench.note}", file=sys.stderr)
            traceback.print_exc()
            status = 1
        _drop_memory()
    return status


def _free_groups(
    name: str, section: Section | None, device: torch.device, taken: Path
) -> Iterator[Checks]:
    """Groups of a section that are from now on this process's; a section that cannot be loaded
    breaks its own processes alone."""
    try:
        section = section or load_section(name)
    except Exception:
        return
    for i, group in enumerate(section.checks(device)):
        try:
            (taken / f"{name}.{i}").touch(exist_ok=False)
        except FileExistsError:
            continue
        torch.manual_seed(i)
        yield group


def _run_group(name: str, group: Checks) -> None:
    started = time.monotonic()
    for check in group.run():
        seconds = round(time.monotonic() - started, 1)
        _say(**as_json(check), section=name, seconds=seconds)
        started = time.monotonic()


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _drop_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    tuples = {key: tuple(fields[key]) for key in ("only", "batches")}
    share = (int(number) for number in sys.argv[3].split("/"))
    asked = KernelBenchOptions(**fields | tuples)
    sys.exit(run_sections(sys.argv[4:], asked, Path(sys.argv[2]), *share))

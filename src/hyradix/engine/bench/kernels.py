"""``hyradix bench kernels``: every kernel checked against float64, then timed.

First each section is checked: on a GPU in a process of its own, all at the same time, which also
compiles what will be timed (into Triton's cache). Then this process times one bench after the
other, until the budget is over. Shares are of the bandwidth of a copy, measured just before.

Owns: the order of it, the report. Does not know: kernels; sections bring those (``cases.py``).
Read next: ``compiled_kernels.py``, and ``benchmarks/gpu`` for the GPU's sections.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, cast

import torch

from hyradix.engine.bench.bandwidth import measure_bandwidth
from hyradix.engine.bench.cases import Bench, Check, Section, time_bench
from hyradix.engine.bench.compiled_kernels import CompiledKernels, KernelShape
from hyradix.engine.bench.provenance import ROOT
from hyradix.engine.device import device_facts
from hyradix.errors import ConfigError
from hyradix.models.config import ModelConfig

GPU_SECTIONS = "benchmarks/gpu"
"""In a checkout: its checks are built from the tests' cases, which no installation has."""
Line = Callable[[str], None]


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


def bench_kernels(
    options: KernelBenchOptions, shape: KernelShape, on_line: Line = print
) -> dict[str, Any]:
    """Check and time; the report, ready for JSON. Raises ``ConfigError``."""
    started = time.monotonic()
    device = check_device(options.device)
    options = replace(options, device=device.type)
    names = section_names(options, device)
    sections: dict[str, Section] = {}
    if device.type == "cuda":
        checks = _checks_in_processes(names, options)
    else:
        sections = {"compiled": CompiledKernels(shape, num_threads=_num_threads())}
        found = () if options.time_only else sections["compiled"].checks(device)
        checks = [_as_json(check) for check in found]
    report: dict[str, Any] = {"checks": checks, "timings": []}
    for check in checks:
        if not check["ok"]:
            on_line(f"FAILED {check['name']}: {check['error']}")
    if not options.check_only:
        bandwidth = measure_bandwidth(device)
        report["bandwidth_tb_s"] = bandwidth.as_json()
        on_line(f"{'kernel':34} {'batch':>5} {'us':>9} {'GB/s':>7} {'of a copy':>9}  TFLOP/s")
        for name in names:
            section = sections.get(name) or _load(name)
            report["timings"] += _time(section, options, device, bandwidth.copy, started, on_line)
    failed = sum(not check["ok"] for check in checks)
    report |= {"failed": failed, "seconds": round(time.monotonic() - started, 1)}
    on_line(f"{len(checks)} checks, {failed} failed, {report['seconds']:.0f} s")
    return report


def kernel_shape(config: ModelConfig) -> KernelShape:
    """The sizes of a gated delta net model. Raises ``ConfigError`` for another."""
    if config.recurrence != "gdn" or config.latent is not None or config.mamba2 is not None:
        raise ConfigError("the CPU's kernel benches are of gated delta net models", param="model")
    return KernelShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        k_heads=config.num_k_heads,
        v_heads=config.num_v_heads,
        k_dim=config.k_dim,
        v_dim=config.v_dim,
        width=config.conv_width,
    )


def check_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda``, there. Raises ``ConfigError``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {name!r}", param="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here; --device cpu measures the compiled "
            "kernels of the CPU",
            param="device",
        )
    return torch.device(name)


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


def _load(name: str) -> Section:
    for path in (str(ROOT), str(ROOT / "src")):
        if path not in sys.path:
            sys.path.insert(0, path)
    return cast(Section, import_module(f"{GPU_SECTIONS.replace('/', '.')}.{name}"))


def _num_threads() -> int:
    return device_facts("cpu").num_threads


def _as_json(check: Check) -> dict[str, Any]:
    found = {"name": check.name, "error": check.error, "limit": check.limit}
    return {**found, "ok": bool(check.is_ok)}


def _time(
    section: Section,
    options: KernelBenchOptions,
    device: torch.device,
    bandwidth: float,
    started: float,
    on_line: Line,
) -> Iterator[dict[str, Any]]:
    for bench in section.benches(device, tune=options.tune):
        if not options.takes(bench):
            continue
        row: dict[str, Any] = {"name": bench.name, "batch": bench.batch, "note": bench.note}
        if time.monotonic() - started > options.budget_s:
            yield row | {"skipped": "the budget is over"}
            continue
        try:
            seconds = time_bench(bench, device)
        except Exception as error:  # one kernel's fault is no reason to lose the others' times
            on_line(f"{bench.name} {bench.batch}: {error!r}"[:200])
            yield row | {"failed": repr(error)[:400]}
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rate = bench.num_bytes / seconds
        tera = bench.flops / seconds * 1e-12
        on_line(
            f"{bench.name:34} {bench.batch:5} {seconds * 1e6:9.1f} {rate * 1e-9:7.0f} "
            f"{rate / bandwidth:9.2f}  {tera or '':5.5} {bench.note}"
        )
        yield row | {
            "us": seconds * 1e6,
            "bytes": bench.num_bytes,
            "gb_s": rate * 1e-9,
            "share": rate / bandwidth,
            "flops": bench.flops,
        }


# ---- checks on a GPU: a process each ---------------------------------------------------------


def _checks_in_processes(names: list[str], options: KernelBenchOptions) -> list[dict[str, Any]]:
    workers = {
        name: subprocess.Popen(
            [sys.executable, "-m", __name__, name, json.dumps(asdict(options))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(x or os.getcwd() for x in sys.path)},
        )
        for name in names
    }
    checks: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget_s
    for name, worker in workers.items():
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


def run_section(name: str, options: KernelBenchOptions) -> int:
    """Print the checks, one JSON object a line; run every bench once, on one input set."""
    section, status, device = _load(name), 0, torch.device(options.device)
    try:
        for check in () if options.time_only else section.checks(device):
            print(json.dumps(_as_json(check)), flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    benches = [] if options.check_only else section.benches(device, tune=options.tune)
    for bench in filter(options.takes, benches):
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
    sys.exit(run_section(sys.argv[1], KernelBenchOptions(**fields | tuples)))

"""``hyradix bench kernels``: every kernel checked against float64, then timed.

First all sections are checked (on a GPU in processes, ``sections.py``). Then this
process times one bench after the other, until the budget is over. Shares are of the bandwidth of a
copy, measured just before.

Owns: the order of it, the report. Does not know: kernels; sections bring those (``cases.py``).
Read next: ``compiled_kernels.py``, and ``benchmarks/gpu`` for the GPU's sections.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hyradix.engine.bench.bandwidth import measure_bandwidth
from hyradix.engine.bench.cases import Section, time_bench
from hyradix.engine.bench.compiled_kernels import CompiledKernels, KernelShape
from hyradix.engine.bench.sections import (
    KernelBenchOptions,
    as_json,
    checks_in_processes,
    load_section,
    section_names,
)
from hyradix.engine.bench.tuning import winners
from hyradix.errors import ConfigError
from hyradix.models.config import ModelConfig

Line = Callable[[str], None]


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
        checks = checks_in_processes(names, options)
    else:
        sections = {"compiled": CompiledKernels(shape, num_threads=torch.get_num_threads())}
        groups = () if options.time_only else sections["compiled"].checks(device)
        checks = [as_json(check) for group in groups for check in group.run()]
    report: dict[str, Any] = {"checks": checks, "timings": []}
    for check in checks:
        if not check["ok"]:
            on_line(f"FAILED {check['name']}: {check['error']}")
    if not options.check_only:
        bandwidth = measure_bandwidth(device)
        report["bandwidth_tb_s"] = bandwidth.as_json()
        on_line(f"{'kernel':34} {'batch':>5} {'us':>9} {'GB/s':>7} {'of a copy':>9}  TFLOP/s")
        for name in names:
            section = sections.get(name) or load_section(name)
            report["timings"] += _time(section, options, device, bandwidth.copy, started, on_line)
    if options.tune:
        on_line(winners(report["timings"]))
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
        row["config"] = str(bench.config or "")
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

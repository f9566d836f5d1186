"""What ``hyradix bench engine`` and ``hyradix bench kernels`` run: measure, report, print.

Owns: the reports (ready for JSON) and the lines that are printed. Does not know: options' names.
Read next: ``engine.py`` and ``kernels.py`` (how it is measured), ``plot.py``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from hyradix.config import Settings
from hyradix.engine.bench.bandwidth import measure_bandwidth, measure_gemm
from hyradix.engine.bench.engine import Driver, EngineBenchOptions, measure, medians
from hyradix.engine.bench.floors import Floors, Known, known_figures
from hyradix.engine.bench.kernels import bench_kernels, kernel_shape
from hyradix.engine.bench.provenance import frame
from hyradix.engine.bench.sections import KernelBenchOptions
from hyradix.engine.bench.start import process_age_s
from hyradix.engine.demo import demo_directory
from hyradix.engine.loading_bar import LoadingBar
from hyradix.engine.model_source import find_source
from hyradix.errors import ConfigError
from hyradix.models.loader import DTYPES, load_config

__all__ = ["EngineBenchOptions", "KernelBenchOptions", "run_engine", "run_kernels"]


def run_kernels(
    options: KernelBenchOptions, config: str | None, arguments: list[str]
) -> dict[str, Any]:
    """The report of ``bench_kernels`` in its frame. Raises ``HyradixError``."""
    model = demo_directory()
    if config is not None:
        model = find_source(Settings(random_weights=config)).model
    shape = kernel_shape(load_config(model))
    report = bench_kernels(options, shape, lambda line: print(line, flush=True))
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return _frame(arguments, torch.device(name)) | report


def run_engine(
    settings: Settings, options: EngineBenchOptions, arguments: list[str]
) -> dict[str, Any]:
    """Build an engine for each log, measure, report. Raises ``HyradixError``."""
    options.check()
    settings = options.pools(settings)
    logs: tuple[int | None, ...] = options.decode_logs or (settings.decode_log,)
    config = load_config(find_source(settings).model)
    drivers: dict[int | None, Driver] = {}
    ages = []
    for log in logs:
        drivers[log] = Driver(replace(settings, decode_log=log), seed=len(drivers))
        ages.append(process_age_s())
    info = next(iter(drivers.values())).engine.info
    device, dtype = torch.device(info.device), DTYPES[info.dtype]
    bandwidth, gemm = measure_bandwidth(device), measure_gemm(device, dtype)
    known = known_figures(config, device.type)
    slots = {"state": info.state_pool_bytes // (info.num_states + 1)}
    slots["kv"] = info.kv_pool_bytes // (info.num_kv_slots + 1)
    floors = Floors(config, dtype.itemsize, slots["state"], slots["kv"])
    report: dict[str, Any] = _frame(arguments, device) | {
        "model": info.model_name,
        "weights": {"bytes": info.weight_bytes, "dtype": info.dtype},
        "slot_bytes": slots,
        "bandwidth_tb_s": bandwidth.as_json(),
        "gemm_tflop_s": float(f"{gemm * 1e-12:.4g}"),
        "start": {str(log): driver.start for log, driver in drivers.items()},
        "process_to_ready_s": ages[0],
    }
    if known is not None:
        report["target_ready_s"] = known.target_ready_s
    _print_start(report)
    with LoadingBar(is_shown=sys.stderr.isatty()) as bar:
        rounds = measure(drivers, options, lambda done, all_: bar.update("Rounds", done, all_))
    report["decode"] = [
        _decode(rounds[f"decode {batch} {log}"], batch, log, options, floors, bandwidth.read, known)
        for batch in options.batches
        for log in logs
    ]
    if options.prefill is not None:
        prompts, length = options.prefill
        operations = floors.prefill_operations(prompts * length, prompts)
        report["prefill"] = {
            "prompts": prompts,
            "length": length,
            **medians(rounds["prefill"]),
            "floor_tokens_per_s": round(prompts * length * gemm / operations),
            "rounds": rounds["prefill"],
        }
        if known is not None:
            report["prefill"] |= {"peer": known.peer_prefill, "target": known.target_prefill}
    if options.cached is not None:
        report["cached"] = _cached(rounds["cached"], options.cached, known)
    for line in _lines(report):
        print(line, flush=True)
    return report


def _decode(
    rounds: list[dict[str, Any]],
    batch: int,
    log: int | None,
    options: EngineBenchOptions,
    floors: Floors,
    read: float,
    known: Known | None,
) -> dict[str, Any]:
    """One row; its floor is at the context in the middle of the reply."""
    figures = medians(rounds)
    context = options.prompt + options.output / 2
    floor = floors.decode_bytes(batch, context, log or 0) / read * 1e3
    row: dict[str, Any] = {
        "batch": batch,
        "decode_log": log,
        "prompt": options.prompt,
        "output": options.output,
        **figures,
        "floor_ms": float(f"{floor:.4g}"),
        "of_floor": round(figures["ms_per_step"] / floor, 2),
        "rounds_ms": [round(x["ms_per_step"], 4) for x in rounds],
    }
    if known is not None:
        row |= {
            "peer_ms": known.peer_ms.get(batch),
            "target_ms": known.target_ms.get(batch),
            "aim_ms": known.aim_ms.get(batch),
        }
    return row


def _cached(
    rounds: list[dict[str, Any]], sizes: tuple[int, int], known: Known | None
) -> dict[str, Any]:
    figures = medians(rounds)
    if figures["cached_tokens"] != sizes[1]:
        found = figures["cached_tokens"]
        raise ConfigError(
            f"--cached: {sizes[1]} tokens should have been found in the cache, {found:.0f} were; "
            "is --prefix-cache off, or are there too few --states?",
            param="cached",
        )
    report = {"length": sizes[0], **figures, "rounds": rounds}
    return report if known is None else report | {"target_ratio": known.target_ratio}


def _print_start(report: dict[str, Any]) -> None:
    """What is known before the first figure: the run may end early."""
    print(f"{report['model']}, {report['weights']['dtype']} on {report['device']}")
    for log, start in report["start"].items():
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["stages_s"].items())
        label = "by device" if log == "None" else log
        print(f"log {label}: ready in {start['ready_s']:.1f} s ({stages})")
    rates = report["bandwidth_tb_s"]
    print(
        f"copy {rates['copy'] * 1e3:.0f} GB/s, read {rates['read'] * 1e3:.0f} GB/s, "
        f"product {report['gemm_tflop_s']:.3g} TFLOP/s",
        flush=True,
    )


def _lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    lines = []
    if report["decode"]:
        lines.append(
            f"{'decode':>6} {'log':>4} {'tok/s':>9} {'ms/step':>8} {'floor':>7} {'ratio':>6}   "
            "schedule submit   wait commit  other device"
        )
    for row in report["decode"]:
        log = "-" if row["decode_log"] is None else row["decode_log"]
        parts = (row[f"{part}_ms"] for part in ("schedule", "submit", "wait", "commit", "other"))
        spelled = " ".join(f"{value:6.2f}" for value in parts)
        on_device = "" if row["device_ms"] is None else f" {row['device_ms']:6.2f}"
        lines.append(
            f"{row['batch']:6} {log:>4} {row['tokens_per_s']:9.1f} {row['ms_per_step']:8.2f} "
            f"{row['floor_ms']:7.2f} {row['of_floor']:6.2f}     {spelled}{on_device}"
        )
    if "prefill" in report:
        row = report["prefill"]
        lines.append(
            f"prefill {row['prompts']} x {row['length']}: {row['tokens_per_s']:.0f} tokens/s "
            f"(products alone: {row['floor_tokens_per_s']})"
        )
    if "cached" in report:
        row = report["cached"]
        lines.append(
            f"first token of {row['length']}: cold {row['cold_ms']:.1f} ms, with "
            f"{row['cached_tokens']:.0f} cached {row['cached_ms']:.1f} ms, {row['ratio']:.1f}x"
        )
    return lines


def _frame(arguments: list[str], device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return frame(["hyradix", *arguments], name)

"""``hyradix bench kernels`` from the inside, on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hyradix.engine.bench import kernels, sections
from hyradix.engine.bench.bandwidth import measure_bandwidth, measure_gemm
from hyradix.engine.bench.cases import Bench, Check, time_bench
from hyradix.engine.bench.compiled_kernels import CompiledKernels, KernelShape
from hyradix.engine.bench.kernels import bench_kernels, kernel_shape
from hyradix.engine.bench.plot import check_plot, plot_kernels
from hyradix.engine.bench.sections import KernelBenchOptions
from hyradix.engine.bench.tuning import winners
from hyradix.engine.demo import demo_directory
from hyradix.errors import ConfigError
from hyradix.models.loader import load_config
from tests.support.real_server import ROOT

CPU = torch.device("cpu")
SHAPE = KernelShape(
    hidden=48, intermediate=40, vocab=97, heads=4, kv_heads=2, head_dim=16, k_heads=2, v_heads=4,
    k_dim=16, v_dim=16, width=4,
)  # fmt: skip
OPTIONS = KernelBenchOptions(device="cpu", batches=(1, 8))


@pytest.fixture(autouse=True)
def _small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_bandwidth", lambda d: measure_bandwidth(d, 1 << 20))


def test_checks_and_times_of_the_compiled_kernels(tmp_path: Path) -> None:
    lines: list[str] = []
    report = bench_kernels(OPTIONS, SHAPE, lines.append)
    assert report["failed"] == 0
    kinds = {row["name"] for row in report["timings"]}
    assert kinds >= {"linear, gdn in", "gdn step", "attention decode", "conv"}
    assert {row["batch"] for row in report["timings"]} == {1, 8}
    for row in report["timings"]:
        assert row["us"] > 0
        rate = row["bytes"] / row["us"] * 1e6
        assert row["share"] == pytest.approx(rate / (report["bandwidth_tb_s"]["copy"] * 1e12), 0.01)
    assert lines[-1].startswith("14 checks, 0 failed")
    plot_kernels(report | {"device": "here"}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CompiledKernels._conv

    def wrong(self: CompiledKernels, batch: int) -> object:
        case = right(self, batch)
        return replace(case, run=lambda: case.run() * 1.01)

    monkeypatch.setattr(CompiledKernels, "_conv", wrong)
    report = bench_kernels(replace(OPTIONS, check_only=True), SHAPE, lambda _: None)
    assert report["failed"] == 2
    assert report["timings"] == []


def test_the_budget_and_a_failing_bench() -> None:
    report = bench_kernels(replace(OPTIONS, budget_s=0.0), SHAPE, lambda _: None)
    assert all(row["skipped"] == "the budget is over" for row in report["timings"])

    class Broken:
        def benches(self, device, *, tune):
            yield Bench("broken", 1, 4, lambda n: [lambda: 1 / 0])

    rows = list(kernels._time(Broken(), OPTIONS, CPU, 1.0, float("inf"), lambda _: None))
    assert "ZeroDivisionError" in rows[0]["failed"]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        bench_kernels(replace(OPTIONS, device="cuda"), SHAPE)
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda"):
        bench_kernels(replace(OPTIONS, device="tpu"), SHAPE)
    with pytest.raises(ConfigError, match="sections on cpu are compiled"):
        bench_kernels(replace(OPTIONS, only=("recurrent",)), SHAPE)
    with pytest.raises(ConfigError, match="gated delta net"):
        kernel_shape(load_config(ROOT / "benchmarks/configs/Bamba-9B.json"))
    monkeypatch.setattr(sections, "ROOT", Path("/nowhere"))
    with pytest.raises(ConfigError, match="of a checkout, which is not here"):
        sections.section_names(OPTIONS, torch.device("cuda"))


def test_the_demo_models_shape_and_the_gpus_sections() -> None:
    shape = kernel_shape(load_config(demo_directory()))
    assert (shape.hidden, shape.channels, shape.projected) == (320, 1024, 1552)
    names = sections.section_names(OPTIONS, torch.device("cuda"))
    assert {"recurrent", "attention", "dense", "prefill"} <= set(names)
    assert "bench" not in names


def test_a_gpus_section_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in Triton's interpreter; a process that breaks off is a failed check."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = replace(OPTIONS, check_only=True, batches=())
    monkeypatch.setattr(sections.os, "cpu_count", lambda: 3)
    checks = sections.checks_in_processes(["keeping", "missing"], options)
    found = [check for check in checks if "section" in check]
    assert {check["section"] for check in found} == {"keeping"}
    assert all(check["ok"] for check in found)
    names = [check["name"] for check in found]
    assert len(names) == len(set(names)) == 8
    reason = "it broke off, exit code 1, in nothing yet"
    broken = [check for check in checks if "section" not in check]
    assert broken == [{"name": "section missing", "error": reason, "ok": False}]
    late = sections.checks_in_processes(["missing"], replace(options, budget_s=0.0))
    assert late[-1]["error"] in ("over its budget of 0 s, in nothing yet", reason)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'hyradix\[plot\]'"):
        check_plot()


def test_rates_and_times_are_of_what_ran() -> None:
    found = measure_bandwidth(CPU, 1 << 20)
    assert found.copy > 1e8
    assert found.read > 1e8
    assert measure_gemm(CPU, torch.float32, 64) > 1e7
    calls: list[int] = []
    bench = Bench("count", 1, 1 << 30, lambda n: [lambda i=i: calls.append(i) for i in range(n)])
    assert bench.num_sets == 1
    assert time_bench(bench, CPU) < 1.0
    assert set(calls) == {0}
    assert Check("x", 0.5, 0.5).is_ok
    assert not Check("x", float("nan"), 0.5).is_ok


def test_winners_stay_while_they_are_close() -> None:
    def row(batch: int, config: str, us: float) -> dict[str, object]:
        return {"name": "step", "batch": batch, "config": config, "us": us}

    found = winners(
        [row(1, "", 9.0), row(1, "A", 5.0), row(1, "B", 6.0), row(8, "A", 10.1), row(8, "B", 10.0),
         row(64, "A", 30.0), row(64, "B", 20.0), {"name": "step", "batch": 64, "skipped": True}]
    )  # fmt: skip
    assert found.splitlines() == [
        "step:",
        "        (1, A),  # 1: 5.0 us, table 9.0  # 8: 10.1 us, table 0.0",
        "        (64, B),  # 64: 20.0 us, table 0.0",
    ]
    assert winners([{"name": "x", "batch": 1, "config": "", "us": 1.0}]) == ""


def test_candidates_are_compiled_once_for_all_batches() -> None:
    class Tuned:
        def checks(self, device):
            return iter(())

        def benches(self, device, *, tune):
            for batch in (1, 8):
                for config in (None, "A"):
                    yield Bench("step", batch, 4, lambda n: [], config=config)

    tuned = replace(OPTIONS, tune=True)
    assert len(sections._to_compile(Tuned(), OPTIONS, CPU)) == 4
    assert len(sections._to_compile(Tuned(), tuned, CPU)) == 2

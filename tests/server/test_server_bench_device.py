"""``hyradix bench kernels`` and ``hyradix bench engine`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hyradix.config import Settings
from hyradix.errors import ConfigError
from hyradix.server import bench_device, cli
from hyradix.server.spaced_lists import SpacedLists, numbers
from tests.support.real_server import ROOT, environment


class FakeBench:
    """In place of what loads torch: keeps what it was asked."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.asked: list[Any] = []
        self.drawn: list[Path] = []

    def check_plot(self) -> None:
        self.asked.append("plot")

    def KernelBenchOptions(self, **options: Any) -> Any:
        return options

    EngineBenchOptions = KernelBenchOptions

    def run_kernels(self, *arguments: Any) -> dict[str, Any]:
        self.asked.append(arguments)
        return self.report

    run_engine = run_kernels

    def write_json(self, path: Path, report: dict[str, Any]) -> None:
        path.write_text(json.dumps(report))

    def plot_kernels(self, report: dict[str, Any], path: Path) -> None:
        self.drawn.append(path)

    plot_engine = plot_kernels


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    bench = FakeBench({"failed": 0, "checks": [1]})
    monkeypatch.setattr(bench_device, "late", lambda name: bench)
    return bench


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


def test_engine_takes_lists_pairs_and_settings(fake: FakeBench, tmp_path: Path) -> None:
    json_path, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = invoke(
        "engine", "--batch", "1", "8", "64", "--decode-log", "0", "16", "--prefill", "8x8192",
        "--cached", "16000:15500", "--random-weights", "c.json", "--states", "70", "--overlap",
        "on", "--json", str(json_path), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    _, (settings, options, _) = fake.asked
    assert settings == Settings(random_weights="c.json", states=70, overlap=True)
    assert options == {
        "batches": (1, 8, 64), "prompt": 1024, "output": 256, "decode_logs": (0, 16),
        "prefill": (8, 8192), "cached": (16000, 15500), "repeats": 3,
    }  # fmt: skip
    assert json.loads(json_path.read_text())["checks"] == [1]
    assert fake.drawn == [plot]


def test_kernels_takes_its_options_and_says_what_failed(fake: FakeBench) -> None:
    result = invoke("kernels", "--only", "a", "b,c", "--batch", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    ((options, config, _),) = fake.asked
    assert (options["only"], options["batches"], config) == (("a", "b", "c"), (8,), None)
    fake.report["failed"] = 1
    assert invoke("kernels").exit_code == 1
    fake.report.update(failed=0, checks=[])
    assert invoke("kernels").exit_code == 1
    assert invoke("kernels", "--time-only").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--batch", "1", "x"], "--batch takes whole numbers"),
        (["engine", "--batch", "0"], "of at least 1"),
        (["engine", "--prefill", "8"], "such as 8x8192"),
        (["engine", "--cached", "0:5"], "such as 16000:15500"),
        (["engine", "--json", "/nowhere/x.json"], "no directory /nowhere"),
        (["kernels", "--plot", "/nowhere/x.png"], "no directory /nowhere"),
        (["kernels", "--check-only", "--time-only"], "leave nothing to do"),
    ],
)
def test_bad_options(fake: FakeBench, arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in result.exception.message
    assert not any(isinstance(x, tuple) for x in fake.asked)


def test_lists_by_space_comma_and_repetition() -> None:
    seen: list[str] = []
    app = typer.Typer()

    @app.command(cls=SpacedLists)
    def run(name: str, batch: str = "", other: int = 0) -> None:
        seen.append(f"{name} {batch} {other}")

    for arguments in (["n", "--batch", "1", "2", "--other", "3"], ["n", "--batch=1,2"],
                      ["--batch", "4", "--other", "3", "n"]):  # fmt: skip
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert seen == ["n 1,2 3", "n 1,2 0", "n 4 3"]
    assert numbers("4 4,2", "batch", least=1) == (4, 2)
    assert numbers("", "batch", least=1) == ()


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hyradix.server import cli;"
        "r = CliRunner().invoke(cli.app, ['bench', 'engine', '--help']); assert r.exit_code == 0;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), cwd=ROOT)


@pytest.mark.slow
def test_cuda_where_there_is_none() -> None:
    command = [sys.executable, "-m", "hyradix", "bench", "kernels", "--device", "cuda"]
    hidden = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=hidden, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("hyradix: error: --device cuda: torch finds no CUDA device")

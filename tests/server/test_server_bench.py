"""``hyradix bench cache`` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyradix.errors import ConfigError
from hyradix.server import cli

POOLS = ("--kv-slots", "0", "--states", "0")


@pytest.fixture
def workload(tmp_path: Path) -> str:
    rows = [
        {"prompt": list(range(10, 110)), "output": [1, 2, 3], "parent": -1, "marks": [50]},
        {"prompt": list(range(10, 110)), "output": [4, 5, 6], "parent": 0, "marks": [50]},
    ]
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", "cache", *arguments])


def test_report_on_stdout_and_as_json(workload: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = bench(workload, *POOLS, "--policy", "lru", "--concurrency", "1", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("hit ratio 0.4950: 99 of 200 prompt tokens in 2 requests\n")
    assert "evict_kv" in result.stdout
    report = json.loads(out.read_text())
    assert report["file"] == "w.jsonl"
    assert (report["hit_ratio"], report["prompt_tokens"], report["cached_tokens"]) == (
        0.495,
        200,
        99,
    )
    assert set(report["peak"]) == {"kv", "states"}
    assert report["miss_reasons"] == {"cold": 1, "none": 1}
    assert report["op_us"]["match"]["p50"] > 0
    assert report["op_us"]["evict_kv"] == {"p50": None, "p99": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "--limit must be positive"),
        (("--seed", "-1"), "--seed must not be negative"),
        (("--json", "/nowhere/at/all.json"), "--json: there is no directory"),
        (("--json", "/"), "--json: / is a directory"),
        (("--concurrency", "0"), "--concurrency must be positive"),
    ],
)
def test_our_own_errors(workload: str, arguments: tuple[str, ...], message: str) -> None:
    error = bench(workload, *POOLS, *arguments).exception
    assert isinstance(error, ConfigError)
    assert message in error.message


@pytest.mark.parametrize(
    "arguments", [(), ("--kv-slots", "0"), (*POOLS, "--marks", "maybe"), (*POOLS, "--states", "x")]
)
def test_wrong_usage_exits_with_2(workload: str, arguments: tuple[str, ...]) -> None:
    assert bench(workload, *arguments).exit_code == 2


@pytest.mark.slow
def test_it_runs_without_torch_and_says_what_is_wrong(workload: str) -> None:
    code = (
        "import sys; from hyradix.server.cli import main\n"
        f"sys.argv = ['hyradix', 'bench', 'cache', {workload!r}, *{POOLS!r}]\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "hyradix", "bench", "cache", "none.jsonl", *POOLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert done.stderr == "hyradix: error: cannot read none.jsonl: No such file or directory\n"

"""The programs in examples/ run."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_server import ROOT, environment

EXAMPLES = ROOT / "examples"


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_offline() -> None:
    output = run(sys.executable, EXAMPLES / "offline.py")
    prompt, cached = map(int, re.findall(r"(\d+) prompt tokens, (\d+) from the cache", output)[0])
    assert 0 < cached < prompt


@pytest.mark.slow
def test_chat_client(server_url: str) -> None:
    output = run(sys.executable, EXAMPLES / "chat_client.py", "--base-url", f"{server_url}/v1")
    counts = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) of (\d+) prompt tokens", output)]
    assert len(counts) == 3
    for (_, before), (cached, _) in itertools.pairwise(counts):
        assert cached >= before - 1


@pytest.mark.slow
def test_raw_http(server_url: str) -> None:
    output = run("bash", EXAMPLES / "raw_http.sh", server_url)
    assert "data: [DONE]" in output
    assert "did you mean 'temperature'?" in output
    assert '{"status":"ok"}' in output


@pytest.mark.slow
def test_mt_bench_on_a_few_questions(server_url: str, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    output = run(
        *(sys.executable, EXAMPLES / "mt_bench.py", "--base-url", f"{server_url}/v1"),
        *("--limit", "8", "--max-tokens", "48", "--json", table),
    )
    assert "all checks passed" in output
    figures = json.loads(table.read_text())
    assert figures["finished"] == 16
    assert figures["rows"][-1]["prompts_kept"] == 8

"""The snippets of the README and of docs/ run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support.markdown import Block, blocks
from tests.support.real_server import ROOT, environment

STANDS_FOR = "http://127.0.0.1:8000"


def run(block: Block, server_url: str = "") -> str:
    text = block.text.replace(STANDS_FOR, server_url)
    command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else None
    done = subprocess.run(
        [*(command or [sys.executable, "-c"]), text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("bash"), ids=lambda b: b.name)
def test_curl_snippets(block: Block, server_url: str) -> None:
    reply = json.loads(run(block, server_url))
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")
    assert reply["usage"]["prompt_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.name)
def test_python_snippets(block: Block, request: pytest.FixtureRequest) -> None:
    needs_server = STANDS_FOR in block.text
    output = run(block, request.getfixturevalue("server_url") if needs_server else "")
    if needs_server:
        counts = re.findall(r"(\d+) of (\d+) tokens cached", output)
        assert len(counts) == 2, output
        (_, first_prompt), (cached, _) = counts
        assert int(cached) >= int(first_prompt) - 1, "the second question missed the cache"


@pytest.mark.parametrize("block", blocks("json"), ids=lambda b: b.name)
def test_json_snippets(block: Block) -> None:
    json.loads(block.text)

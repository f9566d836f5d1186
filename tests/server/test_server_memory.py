"""``hyradix memory`` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyradix.errors import ConfigError, ModelLoadError
from hyradix.server import cli
from hyradix.server.memory import size
from tests.support.real_server import ROOT

NINE = str(ROOT / "benchmarks/configs/Qwen3.5-9B.json")
NEEDED = ("--budget", "140G", "--requests", "32")
KEYS = ["resident_bytes", "peak_bytes", "written_bytes_per_verify", "requests", "states"]


def memory(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["memory", *arguments], env={"COLUMNS": "200"})


def test_the_documented_command_prints_what_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs/memory.md").read_text()
    command = re.search(r"^hyradix memory (.*)$", text, re.MULTILINE)
    shown = re.search(r"```text\n(Qwen.*?)```", text, re.DOTALL)
    assert command is not None
    assert shown is not None
    out = tmp_path / "plan.json"
    first, *rest = command[1].split()
    result = memory(str(ROOT / first), *rest, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout == shown[1]
    modes = json.loads(out.read_text())["modes"]
    assert list(modes) == ["snapshot", "replay", "log"]
    assert all(list(row) == [*KEYS, "kv_slots"] for row in modes.values())
    assert modes["snapshot"]["resident_bytes"] == modes["snapshot"]["peak_bytes"] > 97 << 30


def test_plain_serving_has_one_row(tmp_path: Path) -> None:
    result = memory("demo", *NEEDED, "--json", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    assert "\nplain " in result.stdout
    assert list(json.loads((tmp_path / "o").read_text())["modes"]) == ["plain"]


def test_what_does_not_fit_and_what_is_never_filled() -> None:
    drafts = ("--spec-topk", "4", "--spec-steps", "3", "--spec-nodes", "64")
    result = memory(NINE, "--budget", "20G", "--requests", "32", *drafts)
    assert "snapshot: 32 requests do not fit" in result.stdout
    assert "note: such a beam fills at most 37 of the nodes" in result.stdout
    assert re.search(r"^snapshot .* -  +-$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--spec-nodes", "4"), ConfigError, "drafts need --spec-steps"),
        (("--spec-steps", "6", "--spec-nodes", "6"), ConfigError, "choice is --spec-nodes 7"),
        (("--spec-steps", "6", "--decode-log", "4"), ConfigError, "choice is --decode-log 7"),
        (("--requests", "0"), ConfigError, "choice is --requests 1"),
        (("--json", "/nowhere/o.json"), ConfigError, "cannot write /nowhere/o.json"),
        (("--dtype", "int8"), ConfigError, "--dtype must be one of"),
    ],
)
def test_our_own_errors(arguments: tuple[str, ...], kind: type, message: str) -> None:
    error = memory(NINE, *NEEDED, *arguments).exception
    assert isinstance(error, kind)
    assert message in error.message  # type: ignore[attr-defined]


def test_an_unknown_model() -> None:
    error = memory("owner/name", *NEEDED).exception
    assert isinstance(error, ModelLoadError)


@pytest.mark.parametrize(
    "arguments", [(), (NINE,), (NINE, "--budget", "inf", "--requests", "1"), (NINE, *NEEDED, "--x")]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert memory(*arguments).exit_code == 2


def test_options_are_documented() -> None:
    text = (ROOT / "docs/memory.md").read_text()
    listed = set(re.findall(r"^\| `(--[\w-]+)`", text, re.MULTILINE))
    help_text = memory("--help").stdout
    assert listed == set(re.findall(r"(--[a-z][\w-]+)", help_text)) - {"--help"}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 39, "1.5 TiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text

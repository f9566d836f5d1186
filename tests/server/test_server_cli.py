from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hyradix
from hyradix import command
from hyradix.config import MIB, Settings
from hyradix.server import cli
from hyradix.server.launch import ServeOptions
from hyradix.server.options import HELP, parse_size


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    options: list[ServeOptions] = []

    def run_server(given: ServeOptions, load_text: Any) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(cli, "run_server", run_server)
    return options


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


def test_every_setting_is_an_option_with_help() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    assert set(HELP) == names
    text = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in names:
        assert f"--{name.replace('_', '-')}" in text


def test_defaults_are_those_of_settings(served: list[ServeOptions]) -> None:
    assert invoke("serve").exit_code == 0
    assert served == [ServeOptions(settings=Settings())]


def test_options_arrive(served: list[ServeOptions]) -> None:
    result = invoke(
        *("serve", "--model", "m", "--overlap", "on", "--prefix-cache", "off"),
        *("--memory-bytes", "512MiB", "--check-invariants", "--states", "9", "--port", "1"),
        *("--cors", "http://a", "--cors", "http://b", "--api-key", "k"),
    )
    assert result.exit_code == 0, result.output
    assert served[0].settings == Settings(
        model="m",
        overlap=True,
        prefix_cache=False,
        memory_bytes=512 * MIB,
        check_invariants=True,
        states=9,
    )
    assert served[0].cors_origins == ("http://a", "http://b")
    assert served[0].api_key == "k"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--overlap", "maybe"),
        ("--states", "x"),
        ("--memory-bytes", "much"),
        ("--nonsense",),
        ("--port", "99999"),
        ("--port", "-1"),
    ],
)
def test_wrong_options_exit_with_2(arguments: tuple[str, ...], served: list[ServeOptions]) -> None:
    assert invoke("serve", *arguments).exit_code == 2
    assert not served


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1K", 1024), ("2 GiB", 2 << 30), ("1.5m", 3 << 19), ("8MB", 8 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_bad_size() -> None:
    with pytest.raises(typer.BadParameter):
        parse_size("1X")


def test_offline_commands_use_the_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    class FakeLLM:
        def __init__(self, model: str, **options: Any) -> None:
            made.append((model, options))

        def stream(self, prompt: str, sampling: Any) -> Any:
            return iter(())

    monkeypatch.setitem(vars(hyradix), "LLM", FakeLLM)
    assert invoke("generate", "hello", "--model", "m", "--states", "3").exit_code == 0
    model, options = made[0]
    assert model == "m"
    assert options["states"] == 3
    assert "model" not in options


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hyradix", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )


@pytest.mark.slow
def test_module_runs() -> None:
    assert run_module("--version").stdout == f"hyradix {hyradix.__version__}\n"
    result = run_module("generate", "a", "--temperature", "-1")
    assert result.returncode == 2
    assert result.stderr.startswith("hyradix: error: temperature must be")


@pytest.mark.slow
def test_command_line_does_not_load_torch() -> None:
    code = "import sys, hyradix.server.cli; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_interrupt_while_loading_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == command.INTERRUPTED

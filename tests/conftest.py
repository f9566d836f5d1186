"""Fixtures for all tests, and what is done when a GPU is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator

import pytest

from hyradix.config import EngineConfig
from hyradix.runner.threads import prepare_environment
from tests.support.real_server import RealServer

prepare_environment()  # before torch: tests share the machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--drafts "tree log"``: the fake runner's suite as if every engine drafted."""
    parser.addoption("--drafts", help="a way of drive.DRAFTS, where a test asks for none itself")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests import it."""
    if way := config.getoption("--drafts"):
        from tests.support import drive, harness

        plain = harness.make_config

        def make_config(**options: object) -> EngineConfig:
            is_told = "spec" in options or "decode_log" in options
            return plain(**options if is_told else {**drive.DRAFTS[way], **options})

        harness.make_config = drive.make_config = make_config


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What counts the steps of plain decode is left out with drafts."""
    if config.getoption("--drafts"):
        items[:] = [item for item in items if not item.get_closest_marker("plain_steps")]


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Address (without /v1) of a server with the demo model; started when first asked for."""
    with RealServer() as server:
        yield server.url


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After an illegal access all of a process's calls fail: no other test is to be blamed.

    A process of several is given up, and replaced; the only one ends the run.
    """
    result = yield
    if item.get_closest_marker("gpu") and _is_device_lost():
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)
        pytest.exit(f"the device was lost in {item.nodeid}", returncode=3)
    return result


def _is_device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

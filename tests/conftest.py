"""Fixtures for all tests, and what is done when a GPU is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator

import pytest

from hyradix.runner.threads import prepare_environment
from tests.support.real_server import RealServer

prepare_environment()  # before torch: tests share the machine


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

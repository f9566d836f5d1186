"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyradix.runner.threads import prepare_environment
from tests.support.real_server import RealServer

prepare_environment()  # before torch: tests share the machine


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Address (without /v1) of a server with the demo model; started when first asked for."""
    with RealServer() as server:
        yield server.url

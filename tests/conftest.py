"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_server import RealServer


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Address (without /v1) of a server with the demo model; started when first asked for."""
    with RealServer() as server:
        yield server.url

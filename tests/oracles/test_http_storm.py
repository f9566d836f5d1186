"""A crowded server says what one says that serves one request at a time."""

from __future__ import annotations

import pytest

from tests.oracles.http_storm import run


@pytest.mark.slow
@pytest.mark.parametrize("storm", [[], ["--spec", "mtp", "--states", "64"]], ids=["plain", "mtp"])
def test_a_storm(storm: list[str]) -> None:
    found = run(40, 7, storm, ["--dtype", "float32"])
    assert found["different"] == []
    assert found["is_whole"]
    assert not found["errors"]
    assert found["preemptions"]

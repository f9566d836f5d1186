"""A crowded server says what one says that serves one request at a time."""

from __future__ import annotations

import pytest

from tests.oracles.http_storm import run

MTP = ["--spec", "mtp", "--states", "64"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "storm", [MTP, pytest.param([], marks=pytest.mark.long)], ids=["mtp", "plain"]
)
def test_a_storm(storm: list[str]) -> None:
    found = run(30, 7, storm, ["--dtype", "float32"])
    assert found["different"] == []
    assert found["is_whole"]
    assert not found["errors"]
    assert found["preemptions"]

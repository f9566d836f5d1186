"""Overlap: the next step is built while others run, from tokens that nobody has seen yet."""

from __future__ import annotations

import pytest

from tests.support.drive import CHUNKS, Driver, reply, text
from tests.support.harness import make_config


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_steps_are_built_ahead_of_the_tokens_they_need(chunk: int, ahead: int) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=True))
    n = 50
    record = h.add(text(1, n), 12)
    h.run(until=lambda: bool(record.output))
    while h.num_in_flight:
        h.end()
    seen = len(record.output)
    for depth in range(1, ahead + 2):
        batch = h.begin()
        assert batch is not None, "a decode needs no token on the host"
        assert h.num_in_flight == depth
        assert batch.starts.tolist() == [n + seen + depth - 2]
    h.close()
    assert record.output == reply(record.prompt, 12)


def test_nothing_is_built_past_the_last_token() -> None:
    h = Driver(make_config(overlap=True))
    record = h.add(text(1, 20), 3)
    count = 0
    while h.begin() is not None:
        count += 1
    assert count == 3, "the prompt, and two decodes; the third token is never fed back"
    h.close()
    assert len(record.output) == 3

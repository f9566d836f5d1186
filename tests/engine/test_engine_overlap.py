"""With overlap the engine builds a step while the one before it runs, and nothing changes."""

from __future__ import annotations

import pytest

from hyradix.engine.engine import Engine
from hyradix.request import Request, SamplingParams, ScheduledBatch, StepOutput
from tests.support.demo import DemoEngines

pytestmark = pytest.mark.slow


class Recorder:
    """A runner that notes how many steps were in flight."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self.num_in_flight = 0
        self.most_in_flight = 0
        engine.runner = self

    def submit(self, batch: ScheduledBatch) -> None:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self._runner.submit(batch)

    def collect(self) -> StepOutput:
        self.num_in_flight -= 1
        return self._runner.collect()


def serve(engine: Engine) -> dict[str, list[int]]:
    for number in range(3):
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=b"".join(i.to_bytes(4, "little") for i in range(300, 330 + number)),
            sampling=SamplingParams(max_tokens=9 + number, temperature=0, logprobs=1),
            seed=0,
        )
        assert engine.add(request) is None
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_two_steps_are_in_flight_and_replies_are_the_same() -> None:
    engines = DemoEngines()
    plain = engines.make(num_threads=1)
    alone = Recorder(plain)
    overlapped = engines.make(num_threads=1, overlap=True, check_invariants=True)
    ahead = Recorder(overlapped)
    assert serve(plain) == serve(overlapped)
    assert alone.most_in_flight == 1
    assert ahead.most_in_flight == 2
    assert ahead.num_in_flight == 0
    assert overlapped.stats().kv.held == 0

"""Two steps in flight: nothing waits, nothing uncommitted is folded away, ends are exact."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from hyradix.request import ScheduledBatch, StepOutput
from hyradix.runner.device_runner import DeviceRunner
from tests.runner.device.served import (
    Arrival,
    Poisoner,
    World,
    arrival,
    compare,
    poison_all,
    serve,
    tokens,
)

pytestmark = pytest.mark.slow
DELAY_MS = 60.0
LATE = {"decode_log": 4, "overlap": True, "states": 16, "kv_slots": 400, "track_interval": 4}


class Delay:
    """Holds the device up before every forward; on the CPU it only counts."""

    def __init__(self, device: torch.device) -> None:
        self._cycles = 0
        self.num_forwards = 0
        if device.type == "cuda":
            clock_khz = torch.cuda.get_device_properties(device).clock_rate
            self._cycles = int(clock_khz * DELAY_MS)

    def __call__(self) -> None:
        self.num_forwards += 1
        if self._cycles:
            torch.cuda._sleep(self._cycles)


class Recorder:
    """A runner that notes how many steps are in flight, and how long submitting takes."""

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self.num_in_flight = self.most_in_flight = 0
        self.submits_ms: list[float] = []

    def submit(self, batch: ScheduledBatch) -> None:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        started = time.perf_counter()
        self._runner.submit(batch)
        self.submits_ms.append(1e3 * (time.perf_counter() - started))

    def collect(self) -> StepOutput:
        self.num_in_flight -= 1
        return self._runner.collect()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("model"))


def late(world: World, device: torch.device, **options):
    """An engine whose device is slow, its runner and what it recorded."""
    delay = Delay(device)
    engine = world.engine(
        world.model("triton", str(device)),
        lambda *parts: DeviceRunner(*parts, before_forward=delay),
        **{**LATE, **options},
    )
    runner = engine.runner
    poison_all(runner, engine.scheduler.config)
    Poisoner(engine.scheduler.cache, runner)
    engine.runner = Recorder(runner)
    return engine, engine.runner, delay


@pytest.mark.parametrize("decode_log", [2, 0])
def test_two_steps_are_in_flight_and_submitting_waits_for_neither(
    world, device, decode_log
) -> None:
    """R = 2 is the least: every second step folds what is committed, and only that."""
    traffic = (
        arrival(0, tokens(11, 1), max_tokens=8),
        arrival(2, tokens(6, 2), max_tokens=6, temperature=0.8),
    )
    engine, recorder, delay = late(world, device, decode_log=decode_log)
    compare(serve(engine, traffic), serve(world.twin(prefix_cache=False), traffic))
    assert recorder.most_in_flight == 2
    assert recorder.num_in_flight == 0
    assert 0 < delay.num_forwards <= len(recorder.submits_ms)  # some steps only fold
    if device.type == "cuda":
        assert np.median(recorder.submits_ms) < DELAY_MS / 4


@pytest.mark.parametrize("decode_log", [4, 0])
def test_an_end_found_with_a_token_in_flight_is_resumed_from_exactly(
    world, device, decode_log
) -> None:
    """The token behind the end is in no state that is kept, whatever was computed of it."""
    prompt = tokens(9, 3)
    free = serve(world.twin(), (arrival(0, prompt, max_tokens=12),))
    (said,) = free.tokens.values()
    at = next(i for i in range(6, 12) if said[i] not in said[:i])
    first = arrival(0, prompt, max_tokens=12, stop_token_ids=[said[at]])
    turn = prompt + said[: at + 1] + tokens(3, 4)
    second, third = arrival(25, turn, max_tokens=4), arrival(32, turn[:-1], max_tokens=5)
    traffic = (first, second, third)
    engine, _, _ = late(world, device, decode_log=decode_log)
    found = serve(engine, traffic)
    compare(found, serve(world.twin(prefix_cache=False), traffic))
    resumed = found.last[second.request.request_id].num_cached_tokens
    assert len(prompt) + (at if decode_log else 0) <= resumed <= len(prompt) + at + 1


def test_aborts_and_preemptions_with_steps_in_flight_leave_nothing(world, device) -> None:
    document = tokens(30, 5)
    traffic: tuple[Arrival, ...] = (
        arrival(0, document[:14], max_tokens=20, abort_at=3),
        arrival(1, document[:20], max_tokens=9),
        arrival(2, tokens(5, 6), max_tokens=40, abort_at=11),
        arrival(9, document[:22], max_tokens=6, temperature=0.6, top_p=0.8),
    )
    engine, recorder, _ = late(world, device, force_preempt_every=6)
    found = serve(engine, traffic)
    expected = serve(
        world.twin(prefix_cache=False), tuple(replace(one, abort_at=None) for one in traffic)
    )
    for name, said in found.tokens.items():
        assert said == expected.tokens[name][: len(said)]
        if found.last[name].finish_reason != "abort":
            assert len(said) == len(expected.tokens[name])
    stats = engine.stats()
    assert stats.num_preemptions
    assert stats.kv.held == stats.state.held == 0
    assert recorder.most_in_flight == 2

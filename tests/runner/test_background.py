"""Steps in the background keep their order and their errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hyradix.request import ScheduledBatch, StepOutput
from hyradix.runner.background import BackgroundRunner


def batch(step: int) -> ScheduledBatch:
    none = np.empty(0, np.int32)
    return ScheduledBatch(
        step=step,
        rows=none,
        starts=none,
        num_tokens=none,
        write_from=none,
        state_slots=none,
        samples=np.empty(0, np.bool_),
        max_nodes=none,
        max_accepted=none,
        committed=none,
        num_slots=none,
        is_followed=np.empty(0, np.bool_),
    )


def output(step: int) -> StepOutput:
    none = np.empty(0, np.int32)
    empty = none.reshape(0, 1)
    return StepOutput(step, none, empty, none, np.empty(0, np.bool_), empty, none)


def test_submit_returns_before_the_step_has_run_and_order_is_kept() -> None:
    gate = threading.Event()
    ran: list[int] = []

    def execute(work: ScheduledBatch) -> StepOutput:
        assert gate.wait(5)
        ran.append(work.step)
        return output(work.step)

    runner = BackgroundRunner(execute)
    runner.submit(batch(0))
    runner.submit(batch(1))
    assert not ran
    gate.set()
    assert [runner.collect().step, runner.collect().step] == [0, 1]
    assert ran == [0, 1]


def test_an_error_is_raised_where_the_step_is_collected() -> None:
    def execute(work: ScheduledBatch) -> StepOutput:
        raise ValueError(work.step)

    runner = BackgroundRunner(execute)
    runner.submit(batch(3))
    with pytest.raises(ValueError, match="3"):
        runner.collect()

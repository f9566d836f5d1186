from __future__ import annotations

import logging

import pytest

from hyradix.engine.messages import EngineStats, PoolStats
from hyradix.engine.step_log import StepLog, pool_lines, step_line
from tests.support.fake_engine import Settings, make_info


def stats(**counters: int) -> EngineStats:
    pool = PoolStats(free=75, cached=20, held=5, total=100)
    return EngineStats(**({"num_running": 2, "num_waiting": 1} | counters), kv=pool, state=pool)


def test_line_has_what_operators_look_for() -> None:
    line = step_line(
        stats(num_steps=3),
        stats(num_steps=5, num_computed_tokens=40, num_cached_tokens=60, num_output_tokens=30),
        2.0,
    )
    assert line == (
        "steps: 2, #new-token: 40, #cached-token: 60, #running-req: 2, #queue-req: 1, "
        "KV usage: 25.0%, state usage: 25.0%, gen throughput (token/s): 15.0"
    )


def test_one_line_per_interval_and_none_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    now, reads = [0.0], [0]
    current = [stats(num_steps=0)]

    def read() -> EngineStats:
        reads[0] += 1
        return current[0]

    log = StepLog(logging.getLogger("hyradix.test"), interval_s=5.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        log.update(read)
        for second in range(1, 21):
            now[0] = float(second)
            current[0] = stats(num_steps=min(second, 7))
            log.update(read)
    assert reads[0] == 5
    assert [record.message.split(",")[0] for record in caplog.records] == ["steps: 5", "steps: 2"]


def test_start_up_lines_name_both_pools() -> None:
    text = "\n".join(pool_lines(make_info(Settings(model="fake"))))
    assert "KV pool: 100 slots, 0.1 MiB (103424 bytes)" in text
    assert "state pool: 100 slots, 101.0 MiB" in text

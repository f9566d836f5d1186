"""Log lines that an operator of other engines recognises: what the steps of a while did.

Owns: the wording and the rate of these lines. Does not know: the engine (it is handed counters).
Invariant: at most one line per interval, none while nothing happens.
Read next: ``process.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hyradix.engine.messages import EngineInfo, EngineStats, PoolStats

MIB = 1 << 20


class StepLog:
    """Turns counters into a line now and then."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._last_time = clock()
        self._last: EngineStats | None = None

    def update(self, read_stats: Callable[[], EngineStats]) -> None:
        """Log what happened since the last line, if the interval has passed and anything did.

        ``read_stats`` is called once per interval, not per step.
        """
        now = self._clock()
        elapsed_s = now - self._last_time
        if self._last is not None and elapsed_s < self._interval_s:
            return
        stats, before = read_stats(), self._last
        self._last_time, self._last = now, stats
        if before is not None and stats.num_steps != before.num_steps:
            self._log.info("%s", step_line(before, stats, elapsed_s))


def step_line(before: EngineStats, after: EngineStats, elapsed_s: float) -> str:
    """Describe the steps between two snapshots that lie ``elapsed_s`` apart."""
    computed = after.num_computed_tokens - before.num_computed_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens
    output = after.num_output_tokens - before.num_output_tokens
    return (
        f"steps: {after.num_steps - before.num_steps}, "
        f"#new-token: {computed}, #cached-token: {cached}, "
        f"#running-req: {after.num_running}, #queue-req: {after.num_waiting}, "
        f"KV usage: {_usage(after.kv):.1%}, state usage: {_usage(after.state):.1%}, "
        f"gen throughput (token/s): {output / max(elapsed_s, 1e-9):.1f}" + _drafts(before, after)
    )


def _drafts(before: EngineStats, after: EngineStats) -> str:
    """Tokens that a round with drafts made, its bonus counted, and the share of drafts accepted."""
    rounds = after.num_draft_rounds - before.num_draft_rounds
    if rounds == 0:
        return ""
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return f", accept len: {1 + accepted / rounds:.2f}, accept rate: {accepted / drafted:.2f}"


def pool_lines(info: EngineInfo) -> list[str]:
    """Describe the model and its pools, for the start of the log."""
    total = info.kv_pool_bytes + info.state_pool_bytes
    lines = [
        f"model {info.model_name} ({info.architecture}), {info.dtype} on {info.device}, "
        f"weights {info.weight_bytes / MIB:.1f} MiB, loaded in {info.load_s:.1f} s",
        f"KV pool: {info.num_kv_slots} slots, {info.kv_pool_bytes / MIB:.1f} MiB "
        f"({info.kv_pool_bytes} bytes)",
        f"state pool: {info.num_states} slots, {info.state_pool_bytes / MIB:.1f} MiB "
        f"({info.state_pool_bytes} bytes)",
        f"both pools: {total / MIB:.1f} MiB; up to {info.max_requests} running requests of up to "
        f"{info.max_context} tokens",
    ]
    if info.drafts:
        lines.append(
            f"{info.drafts}: {info.draft_bytes / MIB:.1f} MiB beside the pools "
            f"({info.draft_bytes} bytes)"
        )
    return lines


def _usage(pool: PoolStats) -> float:
    return 1.0 - pool.free / pool.total if pool.total else 0.0

"""Counters and gauges of the control plane, in the form that crosses to the server.

Owns: nothing; reads the scheduler and the cache.
"""

from __future__ import annotations

from hyradix.engine.messages import EngineStats, PoolStats
from hyradix.scheduler.scheduler import Scheduler


def collect_stats(scheduler: Scheduler) -> EngineStats:
    """A snapshot. For each pool free + cached + held = total."""
    cache, counters = scheduler.cache, scheduler.counters
    kv, states, tree = cache.kv, cache.states, cache.tree
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv=_pool(kv.num_free, tree.num_tokens, kv.num_total),
        state=_pool(states.num_free, tree.num_states, states.num_total),
        num_prompt_tokens=counters.prompt_tokens,
        num_cached_tokens=counters.cached_tokens,
        num_computed_tokens=counters.computed_tokens,
        num_output_tokens=counters.output_tokens,
        num_requests=counters.requests,
        num_preemptions=counters.preemptions,
        num_evicted_states=cache.counters.evicted_states,
        num_evicted_kv=cache.counters.evicted_kv,
        num_skipped_saves=cache.counters.skipped_saves,
        num_steps=counters.steps,
        miss_reasons=dict(scheduler.miss_reasons),
        finish_reasons=dict(scheduler.finish_reasons),
    )


def _pool(free: int, cached: int, total: int) -> PoolStats:
    return PoolStats(free=free, cached=cached, held=total - free - cached, total=total)

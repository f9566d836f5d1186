"""What /metrics shows: the engine's counters and the server's own times, for Prometheus.

Owns: every metric's name and help. Does not know: where the numbers come from.
Invariant: one registry per server, none global.
Read next: ``app.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hyradix.engine.messages import EngineInfo, EngineStats, PoolStats
from hyradix.request import MissReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5.0)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_ENGINE_COUNTERS = {
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "num_cached_tokens": ("cached_tokens", "Prompt tokens resumed from the prefix cache."),
    "num_computed_tokens": ("computed_tokens", "Tokens run through the model in prefill."),
    "num_output_tokens": ("output_tokens", "Tokens sampled."),
    "num_requests": ("engine_requests", "Requests that the engine took."),
    "num_preemptions": ("preemptions", "Requests sent back to the queue for want of memory."),
    "num_draft_rounds": ("draft_rounds", "Rounds of a request in which drafts were verified."),
    "num_draft_tokens": ("draft_tokens", "Draft tokens that were verified."),
    "num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
    "num_evicted_states": ("evicted_states", "State checkpoints evicted."),
    "num_evicted_kv": ("evicted_kv_slots", "KV slots evicted."),
    "num_skipped_saves": ("skipped_saves", "Checkpoints not kept for want of a state slot."),
    "num_steps": ("steps", "Engine steps."),
}


class ServerMetrics:
    """The server's own metrics, and the place where the engine's are added."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self.http_requests = Counter(
            "hyradix_http_requests",
            "HTTP responses.",
            ("method", "path", "status"),
            registry=self._registry,
        )
        self.first_token = self._histogram(
            "hyradix_time_to_first_token_seconds",
            "From the start of a request to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = self._histogram(
            "hyradix_inter_token_latency_seconds",
            "Between two tokens of a request.",
            _INTER_TOKEN_BUCKETS,
        )
        self.whole_request = self._histogram(
            "hyradix_request_seconds",
            "From the start of a request to its end.",
            _WHOLE_BUCKETS,
        )

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_, buckets=buckets, registry=self._registry)

    def render(self, info: EngineInfo, stats: EngineStats | None, *, is_alive: bool) -> bytes:
        """The text for Prometheus. Without ``stats`` the last known ones are shown."""
        self._engine.info, self._engine.is_alive = info, is_alive
        self._engine.stats = stats or self._engine.stats
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Makes metric families of a snapshot."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.is_alive = False

    def collect(self) -> Iterator[Metric]:
        """Prometheus's interface."""
        yield _gauge("engine_up", "1 while the engine process lives.", float(self.is_alive))
        if self.info is not None:
            yield from _info_families(self.info)
        if self.stats is not None:
            yield from _stats_families(self.stats)


def _info_families(info: EngineInfo) -> Iterable[Metric]:
    family = GaugeMetricFamily(
        "hyradix_engine_info", "The model.", labels=["model", "architecture", "dtype", "device"]
    )
    family.add_metric([info.model_name, info.architecture, info.dtype, info.device], 1.0)
    yield family
    yield _gauge("kv_pool_bytes", "Bytes of the KV pool.", info.kv_pool_bytes)
    yield _gauge("state_pool_bytes", "Bytes of the state pool.", info.state_pool_bytes)
    yield _gauge("weight_bytes", "Bytes of the weights.", info.weight_bytes)


def _stats_families(stats: EngineStats) -> Iterable[Metric]:
    yield _gauge("requests_running", "Requests in the running batch.", stats.num_running)
    yield _gauge("requests_waiting", "Requests in the queue.", stats.num_waiting)
    yield from _pool_families("kv_slots", "KV", stats.kv)
    yield from _pool_families("state_slots", "State", stats.state)
    for field, (name, help_) in _ENGINE_COUNTERS.items():
        yield CounterMetricFamily(f"hyradix_{name}", help_, value=getattr(stats, field))
    yield _counter_by("cache_misses", "Misses by reason.", "reason", _without_hits(stats))
    yield _counter_by("requests_finished", "Ends by reason.", "reason", stats.finish_reasons)


def _without_hits(stats: EngineStats) -> dict[str, int]:
    return {k: v for k, v in stats.miss_reasons.items() if k != MissReason.NONE}


def _pool_families(name: str, title: str, pool: PoolStats) -> Iterable[Metric]:
    family = GaugeMetricFamily(
        f"hyradix_{name}", f"{title} slots; free + cached + held = total.", labels=["owner"]
    )
    for owner in ("free", "cached", "held"):
        family.add_metric([owner], getattr(pool, owner))
    yield family
    yield _gauge(f"{name}_total_size", f"{title} slots in all.", pool.total)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hyradix_{name}", help_, value=value)


def _counter_by(name: str, help_: str, label: str, values: dict[str, Any]) -> Metric:
    family = CounterMetricFamily(f"hyradix_{name}", help_, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family

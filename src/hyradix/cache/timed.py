"""A prefix cache that measures its own operations, for benchmarks.

Owns: the clock around the calls. The code that is measured is the real one, inherited; ``finish``
contains the ``insert`` of its donation.
Read next: ``prefix_cache.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hyradix.cache.policy import EvictionPolicy, make_policy
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.cache.tree import RadixTree
from hyradix.config import EngineConfig

OPERATIONS = ("match", "lock", "insert", "finish", "evict_state", "evict_kv")

P = ParamSpec("P")
R = TypeVar("R")


class OpTimes:
    """Nanoseconds of every call, by operation."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[int]] = defaultdict(list)

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Operation -> p50 and p99 in microseconds; None for one that never ran."""
        result: dict[str, dict[str, float | None]] = {}
        for name in OPERATIONS:
            spent = self.spent[name]
            p50, p99 = np.percentile(spent, [50, 99]) / 1000 if spent else (None, None)
            result[name] = {"p50": _rounded(p50), "p99": _rounded(p99)}
        return result


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 1)


def _timed(name: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        start = perf_counter_ns()
        result = method(self, *args, **kwargs)
        self.times.spent[name].append(perf_counter_ns() - start)
        return result

    return call


class TimedTree(RadixTree):
    """See the module's docstring."""

    def __init__(self, policy: EvictionPolicy, times: OpTimes) -> None:
        super().__init__(policy)
        self.times = times

    match_prefix = _timed("match", RadixTree.match_prefix)
    lock = _timed("lock", RadixTree.lock)
    insert = _timed("insert", RadixTree.insert)
    evict_state = _timed("evict_state", RadixTree.evict_state)
    evict_kv = _timed("evict_kv", RadixTree.evict_kv)


class TimedCache(PrefixCache):
    """See the module's docstring."""

    def __init__(self, config: EngineConfig) -> None:
        self.times = OpTimes()
        super().__init__(config)

    def make_tree(self) -> RadixTree:
        """See ``PrefixCache``."""
        return TimedTree(make_policy(self.config.policy), self.times)

    finish = _timed("finish", PrefixCache.finish)

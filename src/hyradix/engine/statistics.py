"""Counters and gauges of the control plane, in the form that crosses to the server.

Owns: nothing; reads the scheduler and the cache.
"""

from __future__ import annotations

from hyradix.cache.node import Node
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.engine.messages import (
    CacheView,
    EngineStats,
    NamespaceView,
    NodeView,
    PoolStats,
)
from hyradix.request import Namespace
from hyradix.scheduler.scheduler import Scheduler


def collect_stats(scheduler: Scheduler) -> EngineStats:
    """A snapshot. For each pool free + cached + held = total."""
    cache, counters = scheduler.cache, scheduler.counters
    pools = _pools(cache)
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv=pools["kv"],
        state=pools["state"],
        num_prompt_tokens=counters.prompt_tokens,
        num_cached_tokens=counters.cached_tokens,
        num_computed_tokens=counters.computed_tokens,
        num_output_tokens=counters.output_tokens,
        num_requests=counters.requests,
        num_preemptions=counters.preemptions,
        num_draft_rounds=counters.draft_rounds,
        num_draft_tokens=counters.draft_tokens,
        num_accepted_tokens=counters.accepted_tokens,
        num_evicted_states=cache.counters.evicted_states,
        num_evicted_kv=cache.counters.evicted_kv,
        num_skipped_saves=cache.counters.skipped_saves,
        num_steps=counters.steps,
        miss_reasons=dict(scheduler.miss_reasons),
        finish_reasons=dict(scheduler.finish_reasons),
    )


def view_cache(cache: PrefixCache) -> CacheView:
    """Every node of every namespace. Cost: linear in the tree."""
    by_root: dict[int, list[NodeView]] = {root.node_id: [] for root in cache.tree.roots().values()}
    for node in cache.tree.nodes():
        by_root[node.root.node_id].append(_node(node))
    names = {root.node_id: name for name, root in cache.tree.roots().items()}
    return CacheView(
        namespaces=[
            NamespaceView(id=_name(names[root_id]), nodes=nodes)
            for root_id, nodes in by_root.items()
        ],
        pools=_pools(cache),
    )


def _name(namespace: Namespace) -> tuple[str, str]:
    return namespace.adapter, namespace.salt


def _node(node: Node) -> NodeView:
    parent = node.parent
    is_top = parent is None or parent.parent is None
    return NodeView(
        id=node.node_id,
        parent=None if parent is None or is_top else parent.node_id,
        depth=node.depth,
        num_tokens=node.num_tokens,
        has_state=node.state is not None,
        kv_lock=node.kv_lock,
        state_lock=node.state_lock,
        last_use=max(node.last_use, node.state_last_use),
    )


def _pools(cache: PrefixCache) -> dict[str, PoolStats]:
    kv, states, tree = cache.kv, cache.states, cache.tree
    return {
        "kv": _pool(kv.num_free, tree.num_tokens, kv.num_total),
        "state": _pool(states.num_free, tree.num_states, states.num_total),
    }


def _pool(free: int, cached: int, total: int) -> PoolStats:
    return PoolStats(free=free, cached=cached, held=total - free - cached, total=total)

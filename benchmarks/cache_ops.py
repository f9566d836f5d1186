"""Microseconds of the cache's operations on a tree of 10,000 nodes, beside another engine's.

    python benchmarks/cache_ops.py [--repeats 400] [--no-save]

The other engine: SGLang 0.5.23, its compiled tree core and its Python core, with a tree of the same
size; its figures are recorded ones, not measured in this run. Python's garbage collector is off
while ours are. Written to benchmarks/results/cache_ops.{json,md}.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
from results_file import provenance, write

from hyradix.cache.node import Node, StateRef
from hyradix.cache.policy import make_policy
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.cache.tree import RadixTree
from hyradix.config import DeviceFacts, ModelFacts, Settings, resolve
from hyradix.request import Int32Array, Namespace

NAMESPACE = Namespace()
SEGMENT = 256
LENGTHS = {"1k": 1024, "8k": 8192, "64k": 65536}
TREES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
NODES = 10_000

PEER: dict[str, dict[str, tuple[float, float | None]]] = {
    "match, one node": {"1k": (6, 17), "8k": (11, 25), "64k": (60, 89)},
    "match, chain of 256-token nodes": {"1k": (9, 33), "8k": (33, 187), "64k": (213, 10_350)},
    "insert from the root, extend a chain by 256": {
        "1k": (24, 87),
        "8k": (124, 490),
        "64k": (556, 22_842),
    },
    "finish a request (turn 2)": {"1k": (124, 188), "8k": (181, 209), "64k": (614, 782)},
    "evict one state": {"10k": (39, 53)},
    "evict KV for one token": {"1k": (42, 197), "10k": (108, 2_800), "100k": (2_100, 97_000)},
}

Tokens = Int32Array


class Bench:
    """A tree with ``num_nodes`` leaves of 16 tokens, each with a state, and fresh slots."""

    def __init__(self, num_nodes: int, tree: RadixTree | None = None) -> None:
        self.tree = tree if tree is not None else RadixTree(make_policy("lru"))
        self.rng = np.random.default_rng(num_nodes)
        self.next_slot = 1
        self.next_state = 1
        for _ in range(num_nodes):
            self.insert(self.tokens(16), with_state=True)

    def tokens(self, count: int) -> Tokens:
        return self.rng.integers(10, 1 << 30, size=count, dtype=np.int32)

    def slots(self, count: int) -> Int32Array:
        self.next_slot += count
        return np.arange(self.next_slot - count, self.next_slot, dtype=np.int32)

    def insert(self, tokens: Tokens, *, with_state: bool = False) -> Node:
        """Everything new, past the KV that the tree holds."""
        data = tokens.tobytes()
        match = self.tree.match_prefix(NAMESPACE, data, limit=len(tokens))
        slots = np.concatenate([match.kv_slots, self.slots(len(tokens) - match.num_kv_tokens)])
        node = self.tree.insert(NAMESPACE, data, slots, None, protected_len=0).node
        if with_state:
            state = StateRef(self.next_state, len(tokens), node.digest, 0)
            self.next_state += 1
            self.tree.insert(NAMESPACE, data, slots, state, protected_len=0)
        return node

    def chain(self, count: int, segment: int) -> Tokens:
        """A prefix of ``count`` tokens, held in nodes of ``segment``, a state at its end."""
        tokens = self.tokens(count)
        for end in range(segment, count + 1, segment):
            self.insert(tokens[:end], with_state=end == count)
        return tokens


def median_us(repeats: int, prepare: Callable[[int], Callable[[], object]]) -> float:
    """Median microseconds of what ``prepare`` returns; preparing is not measured."""
    spent = []
    for i in range(repeats + 5):
        call = prepare(i)
        start = perf_counter_ns()
        call()
        spent.append(perf_counter_ns() - start)
    return statistics.median(spent[5:]) / 1000


def match(bench: Bench, tokens: Tokens, repeats: int) -> float:
    data = np.concatenate([tokens, bench.tokens(1)]).tobytes()
    limit = len(tokens)
    assert bench.tree.match_prefix(NAMESPACE, data, limit=limit).num_cached_tokens == limit
    return median_us(
        repeats, lambda i: lambda: bench.tree.match_prefix(NAMESPACE, data, limit=limit)
    )


def insert(bench: Bench, tokens: Tokens, repeats: int, *, from_receipt: bool) -> float:
    """A new leaf of 256 tokens under the chain's end each time."""
    found = bench.tree.match_prefix(NAMESPACE, tokens.tobytes(), limit=len(tokens))
    start = found.kv_node if from_receipt else None

    def prepare(i: int) -> Callable[[], object]:
        data = np.concatenate([tokens, bench.tokens(SEGMENT)]).tobytes()
        slots = np.concatenate([found.kv_slots, bench.slots(SEGMENT)])
        return lambda: bench.tree.insert(
            NAMESPACE, data, slots, None, protected_len=len(tokens), start=start
        )

    return median_us(repeats, prepare)


def evict_state(bench: Bench, repeats: int) -> float:
    return median_us(repeats, lambda i: bench.tree.evict_state)


def evict_kv(bench: Bench, repeats: int) -> float:
    return median_us(repeats, lambda i: lambda: bench.tree.evict_kv(1))


def finish(length: int, repeats: int) -> float:
    """Turn 2 of a chat: the history is cached, 256 new prompt tokens and a reply of 256 are not."""
    cache = make_cache(length)
    bench = Bench(0, cache.tree)
    for _ in range(NODES // 2):  # each leaves a node at its prompt's end and one at its reply's
        serve(cache, bench.tokens(16), 2)()
    history = bench.tokens(length)
    serve(cache, history, 2)()

    def prepare(i: int) -> Callable[[], object]:
        return serve(cache, np.concatenate([history, bench.tokens(SEGMENT)]), SEGMENT)

    return median_us(repeats, prepare)


def make_cache(length: int) -> PrefixCache:
    facts = ModelFacts(
        name="none",
        architecture="none",
        vocab_size=1 << 30,
        max_position=1 << 20,
        kv_bytes_per_slot=1,
        state_bytes_per_slot=1,
        eos_token_ids=(),
    )
    settings = Settings(
        kv_slots=(1 << 20) + 2 * length,
        states=16_384,
        max_requests=2,
        max_context=length + 2048,
        track_interval=0,
    )
    return PrefixCache(resolve(settings, facts, DeviceFacts(kind="cpu", free_bytes=1)))


def serve(cache: PrefixCache, prompt: Tokens, num_output: int) -> Callable[[], object]:
    """One request up to its end; what is returned finishes it."""
    data = prompt.tobytes()
    count = len(prompt)
    cache.begin_step()
    admission = cache.admit(
        cache.match(NAMESPACE, data, limit=count - 1),
        num_prompt_tokens=count,
        num_positions=count + num_output,
        boundaries=(),
    )
    assert admission is not None
    holding = admission.holding
    cache.extend(holding, count)
    cache.plan_saves(holding, holding.num_cached_tokens, count, 0, is_last_chunk=True)
    cache.seal(holding)
    cache.learn(holding, data, count - 1, 0)
    cache.extend(holding, count + num_output - 1)
    whole = np.concatenate([prompt, np.full(num_output, 7, dtype=np.int32)]).tobytes()
    depth = count + num_output - 1
    return lambda: cache.finish(holding, whole, state_depth=depth, kept=depth + 1)


def measure(repeats: int) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {name: {} for name in PEER}
    receipt = "insert from a receipt, extend a chain by 256"
    figures[receipt] = {}
    for label, length in LENGTHS.items():
        bench = Bench(NODES)
        figures["match, one node"][label] = match(bench, bench.chain(length, length), repeats)
        chain = bench.chain(length, SEGMENT)
        figures["match, chain of 256-token nodes"][label] = match(bench, chain, repeats)
        for name, has_receipt in (
            ("insert from the root, extend a chain by 256", False),
            (receipt, True),
        ):
            figures[name][label] = insert(bench, chain, repeats, from_receipt=has_receipt)
        figures["finish a request (turn 2)"][label] = finish(length, min(repeats, 200))
    for label, num_nodes in TREES.items():
        bench = Bench(num_nodes)
        if label == "10k":
            figures["evict one state"][label] = evict_state(bench, min(repeats, num_nodes // 4))
        bench = Bench(num_nodes)
        figures["evict KV for one token"][label] = evict_kv(bench, min(repeats, num_nodes // 4))
    return figures


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = [
        "# Control-plane time, microseconds (median)",
        "",
        "Ours beside SGLang 0.5.23's compiled tree core and its Python core, a tree of 10,000 "
        "nodes (evict KV: as many as stated). Theirs are recorded figures, not measured in this "
        "run.",
        "",
        "| operation | | ours | compiled | Python | ours : compiled |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        for label, ours in row.items():
            compiled, python = PEER.get(name, {}).get(label, (None, None))
            ratio = "" if compiled is None else f"{ours / compiled:.2f}"
            cells = [f"{ours:.1f}", *("" if v is None else f"{v:,.0f}" for v in (compiled, python))]
            lines.append(f"| {name} | {label} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    gc.disable()
    figures: Any = measure(args.repeats)
    text = table(figures)
    print(text)
    if not args.no_save:
        command = f"python benchmarks/cache_ops.py --repeats {args.repeats}"
        write("cache_ops", provenance(command), figures, text)


if __name__ == "__main__":
    main()

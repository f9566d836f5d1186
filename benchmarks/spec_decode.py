"""Decode speed with drafts against plain decode: fixed shapes, and the automatic choice.

    python benchmarks/spec_decode.py [--batches 1 8 32] [--json benchmarks/results/spec_decode.json]

Greedy replies of the demo model to prompts of MT-bench and GSM8K, and to text that repeats its
prompt. Every way serves the same group of prompts one after the other, then the next group comes:
the ratios are medians over groups. Only steps without prefill count: tokens that they made, and
how long they took. Outputs are compared: they must be those of plain decode.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.figures import save  # noqa: E402
from hyradix.engine.engine import Engine  # noqa: E402
from hyradix.request import Request, SamplingParams  # noqa: E402
from hyradix.text.chat_template import ChatTemplate  # noqa: E402
from tests.oracles.prompts import load_conversations  # noqa: E402
from tests.support.demo import DemoEngines  # noqa: E402

MAX_TOKENS = 96
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "ngram chain 4": {"spec": "ngram", "spec_steps": 4},
    "ngram auto": {"spec": "ngram"},
    "mtp chain 1": {"spec": "mtp", "spec_steps": 1},
    "mtp chain 2": {"spec": "mtp", "spec_steps": 2},
    "mtp chain 3": {"spec": "mtp", "spec_steps": 3},
    "mtp chain 5": {"spec": "mtp", "spec_steps": 5},
    "mtp tree 8": {"spec": "mtp", "spec_topk": 2, "spec_steps": 3, "spec_nodes": 8},
    "mtp auto": {"spec": "mtp"},
    "frozen chain 3": {"spec": "frozen_kv_mtp", "spec_steps": 3},
    "frozen auto": {"spec": "frozen_kv_mtp"},
}


@dataclass
class Way:
    """One way to serve, and what it took for each group of prompts."""

    name: str
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def make_prompts(engines: DemoEngines) -> dict[str, list[list[int]]]:
    """Token ids by set."""
    template = ChatTemplate.from_dir(engines.directory, engines.tokenizer)
    sets: dict[str, list[list[int]]] = {"mt_bench": [], "gsm8k": [], "repeating": []}
    for conversation in load_conversations():
        messages = [{"role": "user", "content": conversation.turns[0]}]
        ids = np.asarray(template.render(messages).token_ids).tolist()
        sets[conversation.source].append(ids)
        if conversation.source == "gsm8k":
            text = conversation.turns[0]
            copy = np.asarray(engines.tokenizer.encode((text + "\n") * 3 + text[:40])).tolist()
            sets["repeating"].append(copy)
    return sets


def serve(way: Way, prompts: list[list[int]], name: str) -> list[list[int]]:
    """All prompts at once; returns the replies."""
    replies: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        ids = np.asarray(prompt, dtype="<i4").tobytes()
        request = Request(request_id=f"{name}-{i}", prompt_token_ids=ids, sampling=params, seed=0)
        assert way.engine.add(request) is None
        replies[request.request_id] = []
    seconds = tokens = 0.0
    while way.engine.has_work():
        before = way.engine.scheduler.counters.computed_tokens
        started = time.perf_counter()
        outputs = way.engine.step()
        elapsed = time.perf_counter() - started
        is_decode = way.engine.scheduler.counters.computed_tokens == before
        for output in outputs:
            replies[output.request_id] += output.token_ids
            tokens += len(output.token_ids) * is_decode
        seconds += elapsed * is_decode
    way.seconds.append(seconds)
    way.tokens.append(int(tokens))
    return list(replies.values())


def groups(prompts: list[list[int]], size: int, count: int) -> Iterator[list[list[int]]]:
    """``count`` groups of ``size`` prompts."""
    for i in range(count):
        at = (i * size) % len(prompts)
        yield (prompts + prompts)[at : at + size]


def run(engines: DemoEngines, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """All sets at one batch size."""
    result: dict[str, Any] = {}
    count = {1: args.groups * 2}.get(batch, args.groups)
    for set_name, prompts in make_prompts(engines).items():
        ways = [
            Way(name, engines.make(max_requests=batch, prefix_cache=False, **WAYS[name]))
            for name in args.ways
        ]
        for way in ways:  # what is loaded or compiled late
            serve(way, prompts[-batch:], "warm")
            way.seconds.clear()
            way.tokens.clear()
        differing = 0
        for number, group in enumerate(groups(prompts, batch, count)):
            order = ways[number % len(ways) :] + ways[: number % len(ways)]
            replies = {way.name: serve(way, group, f"{number}") for way in order}
            differing += sum(r != replies["plain"] for r in replies.values())
        plain = next(way for way in ways if way.name == "plain")
        result[set_name] = {"differing": differing, "ways": {}}
        for way in ways:
            ratios = [
                (t / s) / (pt / ps)
                for t, s, pt, ps in zip(
                    way.tokens, way.seconds, plain.tokens, plain.seconds, strict=True
                )
            ]
            stats = way.engine.stats()
            length = 1 + stats.num_accepted_tokens / max(stats.num_draft_rounds, 1)
            result[set_name]["ways"][way.name] = {
                "tokens_per_s": sum(way.tokens) / sum(way.seconds),
                "ratio": median(ratios),
                "whole_ratio": (sum(way.tokens) / sum(way.seconds))
                / (sum(plain.tokens) / sum(plain.seconds)),
                "accept_length": length,
                "rounds": stats.num_draft_rounds,
            }
            line = result[set_name]["ways"][way.name]
            print(
                f"batch {batch:2d} {set_name:10s} {way.name:16s} {line['tokens_per_s']:7.0f} tok/s "
                f"{line['ratio']:.2f}x ({line['whole_ratio']:.2f}x) accept {length:.2f} "
                f"rounds {stats.num_draft_rounds}",
                flush=True,
            )
        print(f"batch {batch:2d} {set_name:10s} differing replies: {differing}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = DemoEngines()
    found = {str(batch): run(engines, batch, args) for batch in args.batches}
    if args.json:
        save(args.json, found)


if __name__ == "__main__":
    main()

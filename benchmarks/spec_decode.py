"""Decode speed with drafts against plain decode: fixed shapes, and the automatic choice.

    python benchmarks/spec_decode.py [--batches 1 8 32] [--json benchmarks/results/spec_decode.json]

Greedy replies of the demo model to all prompts of MT-bench and GSM8K, and to text that repeats its
prompt. Every way serves the same group of prompts, in turns of a tenth of a second, so that what
else the machine does falls on all; then the next group comes. "plain again" is plain once more: by
how much it differs from plain is by how much anything may. Per way and set:
- ``ratio``: median over groups of tokens a second against plain; ``whole``: all tokens by all
  seconds. Only steps without prefill count, with what the choice spends on learning; the first of
  a turn, which finds others' numbers in the caches, counts for nobody.
- ``first``: the first group alone, when an automatic choice knows nothing yet: each set has engines
  of its own, and what is compiled or loaded late is so by others before.
- ``prefill``: plain's seconds in all other steps against this way's (a draft layer works there).
- ``of_best``: an automatic choice against the best of plain and its proposer's fixed shapes.
Outputs are compared: they must be those of plain decode.
"""

from __future__ import annotations

import argparse
import random
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

from hyradix.runner.threads import prepare_environment  # noqa: E402

prepare_environment()

from benchmarks.figures import save  # noqa: E402
from hyradix.engine.engine import Engine  # noqa: E402
from hyradix.request import Request, SamplingParams  # noqa: E402
from hyradix.text.chat_template import ChatTemplate  # noqa: E402
from tests.oracles.prompts import load_conversations  # noqa: E402
from tests.support.demo import DemoEngines  # noqa: E402

MAX_TOKENS = 96
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "plain again": {},
    "ngram chain 4": {"spec": "ngram", "spec_steps": 4},
    "ngram chain 7": {"spec": "ngram", "spec_steps": 7},
    "ngram tree 8": {"spec": "ngram", "spec_topk": 2, "spec_steps": 4, "spec_nodes": 8},
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


TURN_S = 0.1
MIN_GROUPS = 6
"""Where a set has fewer groups of the batch's size, it begins anew."""


@dataclass
class Way:
    """One way to serve, and what it took for each group of prompts."""

    name: str
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    replies: dict[str, list[int]] = field(default_factory=dict)

    def begin(self, prompts: list[list[int]], name: str) -> None:
        """A group, all prompts at once."""
        self.replies = {}
        for column in (self.seconds, self.tokens, self.prefill_seconds):
            column.append(0)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
            ids = np.asarray(prompt, dtype="<i4").tobytes()
            request = Request(
                request_id=f"{name}-{i}", prompt_token_ids=ids, sampling=params, seed=0
            )
            assert self.engine.add(request) is None
            self.replies[request.request_id] = []

    def advance(self, seconds: float, *, is_alone: bool) -> None:
        """Steps for about so long; is_alone: nobody has run since the last."""
        ends, counts = time.perf_counter() + seconds, is_alone
        counters = self.engine.scheduler.counters
        while self.engine.has_work() and time.perf_counter() < ends:
            before, started = counters.computed_tokens, time.perf_counter()
            outputs = self.engine.step()
            elapsed = time.perf_counter() - started
            for output in outputs:
                self.replies[output.request_id] += output.token_ids
            if counters.computed_tokens > before:
                self.prefill_seconds[-1] += elapsed
            elif counts:
                self.seconds[-1] += elapsed
                self.tokens[-1] += sum(len(output.token_ids) for output in outputs)
            counts = True

    def speed(self, group: int | None = None) -> float:
        """Tokens a second, of one group or all."""
        if group is not None:
            return self.tokens[group] / self.seconds[group]
        return sum(self.tokens) / sum(self.seconds)


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


def serve(ways: list[Way], prompts: list[list[int]], name: str) -> int:
    """One group, by all ways in turns: in any order, as it matters who was just before. Returns how
    many have other replies than the first."""
    for way in ways:
        way.begin(prompts, name)
    at_work, rng = ways, random.Random(name)
    while at_work:
        for way in rng.sample(at_work, len(at_work)):
            way.advance(TURN_S, is_alone=len(at_work) == 1)
        at_work = [way for way in at_work if way.engine.has_work()]
    return sum(way.replies != ways[0].replies for way in ways)


def groups(prompts: list[list[int]], size: int, at_most: int) -> Iterator[list[list[int]]]:
    """The prompts in groups of ``size``, and from the beginning again where they are few."""
    count = min(max(-(-len(prompts) // size), MIN_GROUPS), at_most or len(prompts))
    for i in range(count):
        at = (i * size) % len(prompts)
        yield (prompts + prompts)[at : at + size]


def make_ways(engines: DemoEngines, batch: int, args: argparse.Namespace) -> list[Way]:
    """New engines: an automatic choice knows nothing."""
    options: dict[str, object] = {"max_requests": batch, "prefix_cache": False}
    if args.threads:
        options["num_threads"] = args.threads
    return [Way(name, engines.make(**options, **WAYS[name])) for name in args.ways]


def run(engines: DemoEngines, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """All sets at one batch size."""
    result: dict[str, Any] = {}
    late = make_prompts(engines)["gsm8k"][-batch:]
    serve(make_ways(engines, batch, args), late, "warm")  # what is loaded or compiled late
    for set_name, prompts in make_prompts(engines).items():
        if set_name not in args.sets:
            continue
        ways = make_ways(engines, batch, args)
        differing = 0
        for number, group in enumerate(groups(prompts, batch, args.groups)):
            differing += serve(ways, group, f"{number}")
        found = {way.name: figures(way, ways) for way in ways}
        result[set_name] = {"differing": differing, "ways": found}
        for name, line in found.items():
            print(f"batch {batch:2d} {set_name:10s} {name:15s} {spell(line)}", flush=True)
        print(f"batch {batch:2d} {set_name:10s} differing replies: {differing}", flush=True)
    return result


def figures(way: Way, ways: list[Way]) -> dict[str, float]:
    """See the module's docstring."""
    plain = next(way for way in ways if way.name == "plain")
    stats = way.engine.stats()
    indices = range(len(way.tokens))
    found = {
        "tokens_per_s": way.speed(),
        "ratio": median(way.speed(i) / plain.speed(i) for i in indices),
        "whole": way.speed() / plain.speed(),
        "first": way.speed(0) / plain.speed(0),
        "prefill": sum(plain.prefill_seconds) / sum(way.prefill_seconds),
        "accept_length": 1 + stats.num_accepted_tokens / max(stats.num_draft_rounds, 1),
        "rounds": stats.num_draft_rounds,
    }
    if way.name.endswith("auto"):
        proposer = way.name.partition(" ")[0]
        fixed = [w for w in ways if w.name.startswith(proposer) and w is not way]
        found["of_best"] = way.speed() / max(w.speed() for w in [plain, *fixed])
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def spell(line: dict[str, float]) -> str:
    """One line of the table."""
    of_best = f"  of best {line['of_best']:.2f}" if "of_best" in line else ""
    return (
        f"{line['tokens_per_s']:7.0f} tok/s {line['ratio']:.3f}x whole {line['whole']:.3f} "
        f"first {line['first']:.2f} prefill {line['prefill']:.2f} "
        f"accept {line['accept_length']:.2f} rounds {line['rounds']:.0f}{of_best}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--groups", type=int, default=0, help="at most; 0: all prompts")
    parser.add_argument("--sets", nargs="*", default=["mt_bench", "gsm8k", "repeating"])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--threads", type=int, default=0, help="0: as many as a server takes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = DemoEngines()
    found = {str(batch): run(engines, batch, args) for batch in args.batches}
    if args.json:
        save(args.json, found)


if __name__ == "__main__":
    main()

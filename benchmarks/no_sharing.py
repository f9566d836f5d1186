"""A load in which nothing is shared: what does the prefix cache cost?

    python benchmarks/no_sharing.py [--rounds 31] [--json benchmarks/results/no_sharing.json]

Two offline engines with the same model and pools, cache on and off, run the same random prompts
in turn (which of them first alternates), in short runs, so that noise hits both. The pools are
small enough that the engine with the cache has to evict all the time. Prints tokens per second of
both and the median of on / off, by the clock and by processor time (which other work on the
machine disturbs less); exits with 1 if the latter is below --target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import save, spread

from hyradix import LLM, SamplingParams

WARM_ROUNDS = 6
"""Rounds that are not counted: they fill the pools."""


def make_load(
    rng: np.random.Generator, args: argparse.Namespace, vocab_size: int
) -> list[list[int]]:
    """Random prompts; their lengths differ, in the mean ``args.prompt``."""
    lengths = np.clip(rng.lognormal(np.log(args.prompt), 0.6, args.requests), 16, 4 * args.prompt)
    return [rng.integers(10, vocab_size, int(n)).tolist() for n in lengths]


def run(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> tuple[float, float]:
    """Tokens (of prompts and replies) per second, and per second of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    count = sum(len(r.prompt_token_ids) + len(r.outputs[0].token_ids) for r in results)
    return count / clock, count / processor


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens, in the mean")
    parser.add_argument("--reply", type=int, default=32, help="tokens")
    parser.add_argument("--kv-slots", type=int, default=8_192)
    parser.add_argument("--states", type=int, default=24)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = {
        name: LLM(
            args.model,
            prefix_cache=name == "on",
            max_requests=args.requests,
            kv_slots=args.kv_slots,
            states=args.states,
            use_tqdm=False,
        )
        for name in ("on", "off")
    }
    sampling = SamplingParams(temperature=0, max_tokens=args.reply, ignore_eos=True)
    rng = np.random.default_rng(args.seed)
    vocab_size = engines["on"].engine.info.vocab_size
    rates: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for number in range(args.rounds + WARM_ROUNDS):
        prompts = make_load(rng, args, vocab_size)
        for name in ("on", "off") if number % 2 else ("off", "on"):
            rate = run(engines[name], prompts, sampling)
            if number >= WARM_ROUNDS:
                rates[name].append(rate)
    stats = engines["on"].stats()
    print(
        f"cached tokens {stats.num_cached_tokens}; evicted: {stats.num_evicted_states} states, "
        f"{stats.num_evicted_kv} KV slots"
    )
    figures: dict[str, Any] = {}
    for kind, label in enumerate(("clock", "processor")):
        on, off = ([rate[kind] for rate in rates[name]] for name in ("on", "off"))
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        figures[label] = {"on": spread(on), "off": spread(off), "ratio": spread(ratios)}
        print(
            f"{label:10} on {statistics.median(on):8.1f}  off {statistics.median(off):8.1f} "
            f"tokens/s   on / off {statistics.median(ratios):.3f} (median of {args.rounds} pairs, "
            f"{min(ratios):.3f} to {max(ratios):.3f})"
        )
    if args.json is not None:
        save(args.json, figures | {"rounds": args.rounds})
    return 0 if figures["processor"]["ratio"]["median"] >= args.target else 1


if __name__ == "__main__":
    sys.exit(main())

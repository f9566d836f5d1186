"""Prefix reuse on every workload, beside another engine's figures: the control plane alone.

    python benchmarks/cache_table.py [--policy lru] [--seed 1] [--only shared_sys,agent]

Each cell is what `hyradix bench cache` reports for that workload, pool and concurrency (about a
second). The whole run writes benchmarks/results/cache_POLICY.{json,md}; `--only` prints.
The other engine: the best strategy of SGLang 0.5.23's own cache code over the same requests, one
at a time. Hindsight: the best plan found with the whole future known; at S = 0 (unlimited pools)
it is the longest prefix that any earlier request shares.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import workloads
from results_file import provenance, write

from hyradix.engine.bench_cache import BenchOptions, bench_cache
from hyradix.engine.bench_workload import WorkloadRequest, read_workload

STATES = (16, 64, 256, 1024, 0)
KV_SLOTS = {"longdoc": 524_288, "mooncake": 524_288}
DEFAULT_KV_SLOTS = 262_144
CONCURRENCY = (1, 8)

# per number of states: the other engine, target, hindsight
PEER: dict[str, tuple[tuple[float, float, float], ...]] = {
    "shared_sys": (
        *((0.803, 0.925, 0.932), (0.916, 0.925, 0.932), (0.917, 0.928, 0.932)),
        *((0.917, 0.928, 0.932), (0.917, 0.927, 0.932)),
    ),
    "multiturn": (
        *((0.272, 0.47, 0.738), (0.592, 0.88, 0.944), (0.873, 0.93, 0.944)),
        *((0.921, 0.940, 0.944), (0.922, 0.939, 0.944)),
    ),
    "agent": (
        *((0.513, 0.73, 0.872), (0.764, 0.905, 0.931), (0.904, 0.925, 0.931)),
        *((0.914, 0.928, 0.931), (0.914, 0.926, 0.931)),
    ),
    "longdoc": (
        *((0.189, 0.65, 0.807), (0.600, 0.78, 0.864), (0.791, 0.80, 0.864)),
        *((0.791, 0.80, 0.864), (0.862, 0.870, 0.875)),
    ),
    "noshare": (),
    "mooncake": (
        *((0.046, 0.055, 0.162), (0.046, 0.060, 0.201), (0.050, 0.060, 0.201)),
        *((0.050, 0.060, 0.201), (0.217, 0.263, 0.268)),
    ),
}


def load(name: str, seed: int) -> list[WorkloadRequest]:
    if name == "mooncake":
        return read_workload(Path(workloads.TRACE), seed=seed)
    return [
        WorkloadRequest(
            prompt=np.ascontiguousarray(row["prompt"], dtype="<i4").tobytes(),
            output=row["output"],
            parent=row["parent"],
            marks=tuple(row["marks"]),
        )
        for row in getattr(workloads, name)(seed)
    ]


def measure(name: str, seed: int, policy: str) -> list[dict[str, Any]]:
    """The reports of one workload: every pool, at each concurrency and without marks."""
    workload = load(name, seed)
    has_marks = any(request.marks for request in workload)
    variants = [(c, True) for c in CONCURRENCY] + ([(1, False)] if has_marks else [])
    reports: list[dict[str, Any]] = []
    for states in STATES:
        for concurrency, use_marks in variants:
            options = BenchOptions(
                kv_slots=KV_SLOTS.get(name, DEFAULT_KV_SLOTS) if states else 0,
                states=states,
                policy=policy,
                concurrency=concurrency,
                use_marks=use_marks,
            )
            report = bench_cache(workload, options)
            reports.append({"workload": name, "seed": seed, **report})
            print(
                f"{name} S={states} C={concurrency} marks={use_marks}: "
                f"{report['hit_ratio']:.4f} in {report['seconds']} s",
                flush=True,
            )
    return reports


def table(reports: list[dict[str, Any]]) -> str:
    """Hit ratios, one row a workload and pool."""
    found = {
        (r["workload"], r["states"], r["concurrency"], r["marks"]): f"{r['hit_ratio']:.3f}"
        for r in reports
    }
    lines = [
        f"# Prefix reuse: hit ratio of policy `{reports[0]['policy']}`",
        "",
        "Prompt tokens resumed from a state / prompt tokens. S: state slots, the running requests' "
        'included; KV slots 262,144, longdoc and mooncake 524,288; "unlimited": both pools.',
        "The other columns are for one request at a time, with marks.",
        "",
        "| workload | S | one at a time | 8 at a time | one, no marks | SGLang 0.5.23 | target "
        "| hindsight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["workload"] for r in reports):
        for at, states in enumerate(STATES):
            ours = [found.get((name, states, *k), "") for k in ((1, True), (8, True), (1, False))]
            peer = [f"{value:.3f}" for value in PEER[name][at]] if PEER[name] else [""] * 3
            label = states or "unlimited"
            lines.append(f"| {name} | {label} | {' | '.join([*ours, *peer])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="comma-separated names; prints, writes nothing")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(PEER)
    reports = [r for name in names for r in measure(name, args.seed, args.policy)]
    text = table(reports)
    print(text)
    if not args.only:
        command = f"python benchmarks/cache_table.py --policy {args.policy} --seed {args.seed}"
        suffix = "" if args.seed == 1 else f"_seed{args.seed}"
        write(f"cache_{args.policy}{suffix}", provenance(command), reports, text)


if __name__ == "__main__":
    main()

"""Oracle O1 on a real model: random schedules against cold, cache-off runs of the same requests.

Owns: making schedules, running them, comparing. A difference is allowed only where the reference
itself was undecided: at a gap of under ``NEAR_TIE`` between its two best tokens; those are listed.

    PYTHONPATH=.:src python -m tests.oracles.schedules --schedules 200 --json OUT
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hyradix.engine.engine import Engine
from hyradix.engine.messages import RequestOutput
from hyradix.request import Boundary, BoundaryKind, FinishReason, Request, SamplingParams
from tests.support.demo import BuiltEngines, DemoEngines, Engines

NEAR_TIE = 1e-4
CHUNKS = (7, 16, 128, 0)


@dataclass(frozen=True)
class Sizes:
    """Of what is drawn. token_ids: of prompts. longest: prompt."""

    token_ids: range = range(10, 8000)
    documents: tuple[int, ...] = (60, 60, 150, 150, 400, 400, 1000, 2000)
    longest: int = 2000
    max_tokens: int = 12
    num_requests: tuple[int, int] = (6, 9)


@dataclass
class Tally:
    """What the schedules of a run add up to."""

    schedules: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resumes: int = 0
    resumes_off_chunk: int = 0
    preemptions: int = 0
    aborted: int = 0
    draft_rounds: int = 0
    accepted_tokens: int = 0
    near_ties: list[dict[str, object]] = field(default_factory=list)
    failures: list[dict[str, object]] = field(default_factory=list)


@dataclass
class Item:
    """One request of a schedule and what became of it."""

    request: Request
    tokens: list[int]
    output: list[int] = field(default_factory=list)
    last: RequestOutput | None = None


def make_request(
    name: str, tokens: Sequence[int], boundaries: Sequence[int], *, max_tokens: int = 12
) -> Request:
    """A greedy request."""
    return Request(
        request_id=name,
        prompt_token_ids=np.asarray(tokens, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2),
        seed=0,
        boundaries=tuple(Boundary(p, BoundaryKind.TURN) for p in boundaries),
    )


class Reference:
    """Cold runs, cache off, one request at a time; remembered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[bytes, tuple[list[int], list[float]]] = {}

    def run(self, request: Request) -> tuple[list[int], list[float]]:
        """Output tokens, and the gap between the two best logprobs at each."""
        key = request.prompt_token_ids
        if key not in self._known:
            assert self._engine.add(request) is None
            tokens: list[int] = []
            gaps: list[float] = []
            while self._engine.has_work():
                for output in self._engine.step():
                    tokens += output.token_ids
                    for item in output.logprobs or []:
                        gaps.append(item.top[0][1] - item.top[1][1])
            self._known[key] = (tokens, gaps)
        return self._known[key]


def random_prompt(
    rng: random.Random, document: list[int], done: list[Item], sizes: Sizes
) -> list[int]:
    """A finished conversation going on, or a prefix of a shared document; usually with a tail."""
    kind = rng.random()
    if done and kind < 0.6:
        base = rng.choice(done)
        tokens = base.tokens + base.output
        if rng.random() < 0.15:
            tokens = tokens[: rng.randint(1, len(tokens))]
    else:
        tokens = document[: rng.randint(1, len(document))]
    if rng.random() < 0.7:
        tokens = tokens + [rng.choice(sizes.token_ids) for _ in range(rng.randint(1, 40))]
    return tokens[: sizes.longest]


def run_schedule(
    rng: random.Random, engine: Engine, document: list[int], name: str, sizes: Sizes
) -> list[Item]:
    """Some requests arriving at random; a few are aborted; returns those that finished."""
    items: dict[str, Item] = {}
    waiting = rng.randint(*sizes.num_requests)
    while waiting or engine.has_work():
        if waiting and (rng.random() < 0.1 or not engine.has_work()):
            done = [i for i in items.values() if i.last is not None]
            tokens = random_prompt(rng, document, done, sizes)
            marks = sorted({rng.randint(1, len(tokens)) for _ in range(rng.randint(0, 2))})
            limit = sizes.max_tokens
            request = make_request(f"{name}-{waiting}", tokens, marks, max_tokens=limit)
            assert engine.add(request) is None
            items[request.request_id] = Item(request, tokens)
            waiting -= 1
        if rng.random() < 0.01 and items:
            engine.abort(rng.choice(list(items)))
        for output in engine.step():
            item = items[output.request_id]
            item.output += output.token_ids
            if output.is_finished:
                item.last = output
    return list(items.values())


def compare(
    item: Item, reference: Reference, tally: Tally, chunk: int, *, near_tie: float = NEAR_TIE
) -> None:
    """Count one request; list its first difference, if there is one."""
    assert item.last is not None
    tally.requests += 1
    tally.prompt_tokens += len(item.tokens)
    tally.cached_tokens += item.last.num_cached_tokens
    if item.last.num_cached_tokens:
        tally.resumes += 1
        tally.resumes_off_chunk += bool(chunk == 0 or item.last.num_cached_tokens % chunk)
    if item.last.finish_reason is FinishReason.ABORT:
        tally.aborted += 1
    expected, gaps = reference.run(item.request)
    got = item.output
    if item.last.finish_reason is FinishReason.ABORT:
        expected = expected[: len(got)]
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    if at is None and len(got) == len(expected):
        return
    at = min(len(got), len(expected)) if at is None else at
    entry = {
        "request": item.request.request_id,
        "position": at,
        "gap": gaps[at] if at < len(gaps) else None,
        "cached": item.last.num_cached_tokens,
        "prompt": len(item.tokens),
    }
    is_tie = at < len(gaps) and gaps[at] < near_tie
    (tally.near_ties if is_tie else tally.failures).append(entry)


def make_reference(engines: Engines | BuiltEngines) -> Reference:
    """Of every request, on an engine of its own."""
    return Reference(engines.make(prefix_cache=False, max_requests=1, num_threads=1))


def run(
    engines: Engines | BuiltEngines,
    count: int,
    seed: int = 0,
    *,
    sizes: Sizes = Sizes(),
    reference: Reference | None = None,
    near_tie: float = NEAR_TIE,
    **options: object,
) -> Tally:
    """``count`` schedules; the chunk size goes round, the rest comes from ``options``."""
    rng = random.Random(seed)
    reference = reference or make_reference(engines)
    tally = Tally()
    for number in range(count):
        chunk = CHUNKS[number % len(CHUNKS)]
        choices: dict[str, object] = {"num_threads": 1}
        choices |= {"max_requests": rng.choice([2, 4, 8]), "states": rng.choice([12, 40])}
        choices["track_interval"] = rng.choice([0, 4, 256])
        choices["check_invariants"] = number % 8 == 0
        engine = engines.make(max_prefill_tokens=chunk, **{**choices, **options})
        length = rng.choice(sizes.documents)
        document = [rng.choice(sizes.token_ids) for _ in range(length)]
        items = run_schedule(rng, engine, document, f"s{number}", sizes)
        tally.schedules += 1
        stats = engine.stats()
        tally.preemptions += stats.num_preemptions
        tally.draft_rounds += stats.num_draft_rounds
        tally.accepted_tokens += stats.num_accepted_tokens
        for item in items:
            compare(item, reference, tally, chunk, near_tie=near_tie)
    return tally


def main() -> None:
    """The recorded run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--force-preempt-every", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE, help="a gap of logprobs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    if args.device == "cpu":
        engines: Engines | BuiltEngines = DemoEngines(args.model, dtype=args.dtype)
    else:
        engines = BuiltEngines(args.model, device=args.device, dtype=args.dtype)
    tally = run(
        engines,
        args.schedules,
        args.seed,
        near_tie=args.near_tie,
        overlap=args.overlap,
        force_preempt_every=args.force_preempt_every,
    )
    result = asdict(tally) | {
        "cached_share": tally.cached_tokens / tally.prompt_tokens,
        "off_chunk_share": tally.resumes_off_chunk / max(tally.resumes, 1),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if tally.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

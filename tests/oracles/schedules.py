"""Oracle O1 on a real model: random schedules against cold, cache-off runs of the same requests.

Owns: making schedules, running them, comparing. A difference is allowed only where the reference
itself was undecided: at a gap of under ``NEAR_TIE`` between its two best tokens; those are listed.
By Triton's kernels there are two references: the same kernels, and the CPU's, whose activations are
float32 whatever the type of the weights is.

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

import msgspec
import numpy as np

from hyradix.engine.engine import Engine
from hyradix.engine.messages import RequestOutput
from hyradix.request import Boundary, BoundaryKind, FinishReason, Request, SamplingParams
from tests.support.demo import DemoEngines, Engines, settle

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


TINY = Sizes(
    token_ids=range(10, 97), documents=(9, 14), longest=24, max_tokens=3, num_requests=(3, 3)
)
"""For the interpreter."""


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
    """A greedy request, which a device samples by itself."""
    return Request(
        request_id=name,
        prompt_token_ids=np.asarray(tokens, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
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
            settle()
            self._known[key] = self._compute(request)
            settle()
        return self._known[key]

    def _compute(self, request: Request) -> tuple[list[int], list[float]]:
        sampling = msgspec.structs.replace(request.sampling, logprobs=2)
        assert self._engine.add(msgspec.structs.replace(request, sampling=sampling)) is None
        tokens: list[int] = []
        gaps: list[float] = []
        while self._engine.has_work():
            for output in self._engine.step():
                tokens += output.token_ids
                for item in output.logprobs or []:
                    gaps.append(item.top[0][1] - item.top[1][1])
        return tokens, gaps


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


@dataclass(frozen=True)
class Judge:
    """A reference, its name in what is listed, and the gap up to which it is undecided."""

    name: str
    reference: Reference
    near_tie: float = NEAR_TIE

    def compare(self, item: Item, tally: Tally) -> None:
        """List the first difference, if there is one."""
        assert item.last is not None
        expected, gaps = self.reference.run(item.request)
        if item.last.finish_reason is FinishReason.ABORT:
            expected = expected[: len(item.output)]
        at = first_difference(item.output, expected)
        if at is None:
            return
        gap = gaps[at] if at < len(gaps) else None
        entry = {
            "request": item.request.request_id,
            "against": self.name,
            "position": at,
            "gap": gap,
            "cached": item.last.num_cached_tokens,
            "prompt": len(item.tokens),
        }
        is_tie = gap is not None and gap < self.near_tie
        (tally.near_ties if is_tie else tally.failures).append(entry)


def first_difference(found: list[int], expected: list[int]) -> int | None:
    """Where they part, or one of them ends; None: they are equal."""
    if found == expected:
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))


def count(item: Item, tally: Tally, chunk: int) -> None:
    """Add one request."""
    assert item.last is not None
    cached = item.last.num_cached_tokens
    tally.requests += 1
    tally.prompt_tokens += len(item.tokens)
    tally.cached_tokens += cached
    if cached:
        tally.resumes += 1
        tally.resumes_off_chunk += bool(chunk == 0 or cached % chunk)
    tally.aborted += item.last.finish_reason is FinishReason.ABORT


def make_reference(engines: Engines) -> Reference:
    """Of every request, on an engine of its own, which decodes in place, a step at a time."""
    return Reference(
        engines.make(prefix_cache=False, max_requests=1, num_threads=1, decode_log=0, overlap=False)
    )


def run(
    engines: Engines,
    number: int,
    seed: int = 0,
    *,
    sizes: Sizes = Sizes(),
    judges: Sequence[Judge] = (),
    **options: object,
) -> Tally:
    """Schedules; the chunk size goes round, the rest comes from ``options``.

    judges: of every request; default: the engines' own cold runs.
    """
    rng = random.Random(seed)
    judges = judges or [Judge("cold", make_reference(engines))]
    tally = Tally()
    for i in range(number):
        chunk = CHUNKS[i % len(CHUNKS)]
        choices: dict[str, object] = {"num_threads": 1}
        choices |= {"max_requests": rng.choice([2, 4, 8]), "states": rng.choice([12, 40])}
        choices["track_interval"] = rng.choice([0, 4, 256])
        choices["check_invariants"] = i % 8 == 0
        engine = engines.make(max_prefill_tokens=chunk, **{**choices, **options})
        length = rng.choice(sizes.documents)
        document = [rng.choice(sizes.token_ids) for _ in range(length)]
        items = run_schedule(rng, engine, document, f"s{i}", sizes)
        tally.schedules += 1
        stats = engine.stats()
        tally.preemptions += stats.num_preemptions
        tally.draft_rounds += stats.num_draft_rounds
        tally.accepted_tokens += stats.num_accepted_tokens
        for item in items:
            count(item, tally, chunk)
            for judge in judges:
                judge.compare(item, tally)
    return tally


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--force-preempt-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--decode-log", type=int, default=0, metavar="ROWS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="triton on the cpu: TRITON_INTERPRET=1")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE, help="a gap of logprobs")
    parser.add_argument("--cpu-near-tie", type=float, help="against the CPU; default: the same")
    parser.add_argument("--tiny", action="store_true", help="few short prompts: to try it")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_judges(args: argparse.Namespace, engines: Engines) -> list[Judge]:
    """The kernels' own cold runs, and where they are Triton's, the CPU's."""
    judges = [Judge("cold", make_reference(engines), args.near_tie)]
    if args.device != "cpu" or args.backend == "triton":
        on_cpu = make_reference(DemoEngines(args.model, dtype=args.dtype))
        near_tie = args.near_tie if args.cpu_near_tie is None else args.cpu_near_tie
        judges.append(Judge("cpu", on_cpu, near_tie))
    return judges


def main() -> None:
    """The recorded run."""
    args = parse()
    started = time.monotonic()
    engines = DemoEngines(args.model, dtype=args.dtype, backend=args.backend, device=args.device)
    least: dict[str, object] = {"min_gain": 1} if args.tiny else {}
    tally = run(
        engines,
        args.schedules,
        args.seed,
        sizes=TINY if args.tiny else Sizes(),
        judges=make_judges(args, engines),
        overlap=args.overlap,
        decode_log=args.decode_log,
        force_preempt_every=args.force_preempt_every,
        **least,
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

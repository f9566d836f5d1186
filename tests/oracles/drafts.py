"""Oracle O1 for drafts: every proposer, shape of drafts and way to keep states, against plain runs.

Owns: the cases, serving the conversations under each, comparing with a cold, cache-off, spec-off
run of every request. A difference is allowed only at a near tie of the reference, and is listed.
Greedy ones are near by the two best logprobs, sampled ones by how far the noise was from another
token.

    PYTHONPATH=.:src python -m tests.oracles.drafts --corpus DIR --workers 2 --json OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyradix.engine.engine import Engine
from hyradix.request import Boundary, Request, SamplingParams
from hyradix.text.chat_template import ChatTemplate
from tests.oracles.prompts import Conversation, load_conversations
from tests.support.demo import DemoEngines

NEAR_TIE = 1e-4
PROPOSERS = ("ngram", "mtp", "frozen_kv_mtp")
SHAPES = {
    "chain3": (1, 3, 4),
    "tree8": (2, 3, 8),
    "tree63": (4, 6, 63),
    "tree21": (4, 3, 21),
    "chain5": (1, 5, 6),
}
JUDGED = ("chain3", "tree8", "tree63")
"""Shapes of the recorded run; the others are for tables of acceptance."""
MODES = ("snapshot", "replay", "log")
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}
MAX_TOKENS = 48
CONCURRENCY = 8


@dataclass(frozen=True)
class Case:
    """One way to serve everything."""

    proposer: str
    shape: str
    mode: str
    cache: bool
    sampling: str


@dataclass
class Served:
    """One request, its plain reply, and how near the reference came to another token."""

    name: str
    source: str
    turn: int
    prompt: list[int]
    boundaries: list[tuple[int, str]]
    seed: int
    reply: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


def request_of(item: Served, sampling: str, suffix: str = "") -> Request:
    """The request that ``item`` stands for."""
    return Request(
        request_id=item.name + suffix,
        prompt_token_ids=np.asarray(item.prompt, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, logprobs=2, **SAMPLING[sampling]),
        seed=item.seed,
        boundaries=tuple(Boundary(p, kind) for p, kind in item.boundaries),  # type: ignore[arg-type]
    )


def serve(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[float], int]]:
    """Everything at once; the engine lets in as many as it has rows. Tokens, gaps, cached."""
    found: dict[str, tuple[list[int], list[float], int]] = {}
    for request in requests:
        refusal = engine.add(request)
        assert refusal is None, refusal
        found[request.request_id] = ([], [], 0)
    while engine.has_work():
        for output in engine.step():
            tokens, gaps, _ = found[output.request_id]
            tokens += output.token_ids
            for item in output.logprobs or []:
                gaps.append(item.top[0][1] - item.top[1][1])
            found[output.request_id] = (tokens, gaps, output.num_cached_tokens)
    return found


def make_reference(
    engines: DemoEngines, conversations: list[Conversation], sampling: str
) -> list[Served]:
    """Plain runs, one request at a time, cache off; second turns go on from the plain replies."""
    engine = engines.make(prefix_cache=False, max_requests=1, num_threads=1)
    template = ChatTemplate.from_dir(engines.directory, engines.tokenizer)
    served = []
    for number, conversation in enumerate(conversations):
        messages: list[dict[str, str]] = []
        turns = conversation.turns or ("",)
        for turn, text in enumerate(turns):
            name = f"{conversation.name}-{turn}"
            item = Served(name, conversation.source, turn, [], [], seed=1000 + number)
            if conversation.turns:
                messages.append({"role": "user", "content": text})
                rendered = template.render(messages)
                item.prompt = np.asarray(rendered.token_ids).tolist()
                item.boundaries = [(b.position, b.kind) for b in rendered.boundaries]
            else:
                item.prompt = np.asarray(engines.tokenizer.encode(conversation.text)).tolist()
            (reply, gaps, _) = serve(engine, [request_of(item, sampling)])[name]
            item.reply, item.gaps = reply, gaps
            served.append(item)
            content = engines.tokenizer.decode(reply)
            messages.append({"role": "assistant", "content": content})
    return served


def run_case(engines: DemoEngines, case: Case, items: list[Served]) -> Outcome:
    """Serve first turns, then second ones, and compare each with its plain run."""
    topk, steps, nodes = SHAPES[case.shape]
    engine = engines.make(
        prefix_cache=case.cache,
        max_requests=CONCURRENCY,
        kv_slots=65_536,
        states=400,
        num_threads=1,
        spec=case.proposer,
        spec_state=case.mode,
        spec_topk=topk,
        spec_steps=steps,
        spec_nodes=nodes,
        track_interval=32,
    )
    outcome = Outcome(case)
    started = time.monotonic()
    for turn in (0, 1):
        wave = [item for item in items if item.turn == turn]
        found = serve(engine, [request_of(item, case.sampling) for item in wave])
        for item in wave:
            tokens, _, cached = found[item.name]
            outcome.requests += 1
            outcome.output_tokens += len(tokens)
            outcome.prompt_tokens += len(item.prompt)
            outcome.cached_tokens += cached
            compare(item, tokens, outcome)
    outcome.seconds = time.monotonic() - started
    stats = engine.stats()
    outcome.rounds = stats.num_draft_rounds
    outcome.draft_tokens = stats.num_draft_tokens
    outcome.accepted_tokens = stats.num_accepted_tokens
    return outcome


def compare(item: Served, tokens: list[int], outcome: Outcome) -> None:
    """List the first difference, if there is one."""
    if tokens == item.reply:
        return
    pairs = enumerate(zip(tokens, item.reply, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(item.reply)))
    gap = item.gaps[at] if at < len(item.gaps) else None
    entry = {"request": item.name, "position": at, "gap": gap}
    is_tie = gap is not None and gap < NEAR_TIE
    (outcome.near_ties if is_tie else outcome.failures).append(entry)


def cases(args: argparse.Namespace) -> list[Case]:
    """All that the arguments leave."""
    product = itertools.product(args.proposers, args.shapes, args.modes, args.cache, args.sampling)
    return [
        Case(proposer, shape, mode, cache == "on", sampling)
        for proposer, shape, mode, cache, sampling in product
    ]


_engines: DemoEngines | None = None


def _work(job: tuple[str, Any, Any]) -> Any:
    """In a worker process: a part of the reference, or a case."""
    global _engines
    if _engines is None:
        _engines = DemoEngines()
    kind, what, items = job
    if kind == "reference":
        return make_reference(_engines, items, what)
    return run_case(_engines, what, items)


def main() -> None:
    """The recorded run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="A folder with text_*.txt.gz.")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--every", type=int, default=1, help="Take every N-th conversation.")
    parser.add_argument("--proposers", nargs="*", default=list(PROPOSERS))
    parser.add_argument("--shapes", nargs="*", default=list(JUDGED))
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--sampling", nargs="*", default=list(SAMPLING))
    parser.add_argument("--cache", nargs="*", default=["on", "off"])
    parser.add_argument("--sources", nargs="*", help="mt_bench, gsm8k, corpus; default: all.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    conversations = [
        conversation
        for conversation in load_conversations(args.corpus)[:: args.every]
        if args.sources is None or conversation.source in args.sources
    ]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        parts = [conversations[i :: args.workers] for i in range(args.workers)]
        jobs: list[Any] = [("reference", s, p) for s in args.sampling for p in parts if p]
        made = pool.map(_work, jobs, chunksize=1)
        references: dict[str, list[Served]] = {s: [] for s in args.sampling}
        for (_, sampling, _), items in zip(jobs, made, strict=True):
            references[sampling] += items
        jobs = [("case", case, references[case.sampling]) for case in cases(args)]
        outcomes = []
        for outcome in pool.imap_unordered(_work, jobs, chunksize=1):
            outcomes.append(outcome)
            print(line(outcome), flush=True)
    total = sum(o.requests for o in outcomes)
    result = {
        "seconds": time.monotonic() - started,
        "requests": total,
        "near_ties": sum(len(o.near_ties) for o in outcomes),
        "failures": sum(len(o.failures) for o in outcomes),
        "cases": [asdict(o) for o in outcomes],
    }
    print({key: value for key, value in result.items() if key != "cases"})
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def line(outcome: Outcome) -> str:
    """One line of the table."""
    case = outcome.case
    length = 1 + outcome.accepted_tokens / max(outcome.rounds, 1)
    return (
        f"{case.proposer:14s} {case.shape:7s} {case.mode:9s} cache={case.cache!s:5s} "
        f"{case.sampling:7s} requests={outcome.requests} tokens={outcome.output_tokens} "
        f"length={length:.2f} cached={outcome.cached_tokens / outcome.prompt_tokens:.2f} "
        f"ties={len(outcome.near_ties)} failures={len(outcome.failures)} "
        f"{outcome.output_tokens / outcome.seconds:.0f} tok/s"
    )


if __name__ == "__main__":
    main()

"""A load of real requests' lengths and shared beginnings over HTTP: rates and latencies.

    python benchmarks/serve_load.py [--base-url URL] [--requests 256] [--scale 0.25]
        [--longest 8192] [--concurrency 64 | --speed 1.0] [--json OUT] [-- OPTIONS OF hyradix serve]

Prompts are those of the conversation trace in ``benchmarks/data``: so many tokens, and the same
blocks of tokens where the trace has the same hash. All lengths, blocks included, are scaled by one
factor; a prompt that would still be longer than ``--longest`` with its reply is cut (a few are
far longer than the others). Requests arrive at the trace's
times divided by ``--speed``, or, with ``--concurrency``, one enters when another ends. Replies go
on to their full length whatever they say, as streams; each is checked to be whole. Without
--base-url a server is started (with the options after ``--``) and stopped. Exits with 1 where a
request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import httpx  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.figures import save  # noqa: E402

TRACE = ROOT / "benchmarks/data/mooncake_conversation.jsonl.gz"
BLOCK = 512
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Job:
    """One request. arrival: seconds after the first."""

    arrival: float
    prompt: list[int]
    max_tokens: int


@dataclass
class Reply:
    """What came of it. times: (seconds since it was sent, tokens) of each event with tokens."""

    times: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    seconds: float = 0.0
    error: str = ""

    def take(self, event: dict[str, Any], seconds: float) -> None:
        """An event of the stream."""
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                self.times.append((seconds, len(choice["token_ids"])))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = event.get("usage") or self.usage

    def fault(self, job: Job) -> str:
        """What is wrong with it; empty: it is whole."""
        count = sum(tokens for _, tokens in self.times)
        expected = {
            "the stream ends": (self.is_done, True),
            "finish_reason": (self.finish_reason, "length"),
            "tokens": (count, job.max_tokens),
            "usage.completion_tokens": (self.usage.get("completion_tokens"), job.max_tokens),
            "usage.prompt_tokens": (self.usage.get("prompt_tokens"), len(job.prompt)),
        }
        wrong = [f"{k}: {got}, not {want}" for k, (got, want) in expected.items() if got != want]
        return self.error or "; ".join(wrong)


def read_jobs(trace: Path, count: int, *, scale: float, longest: int, vocab: int) -> list[Job]:
    """The first ``count`` requests."""
    with gzip.open(trace, "rt") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, count)]
    return [_job(i, row, scale, longest, vocab) for i, row in enumerate(rows)]


def _job(number: int, row: dict[str, Any], factor: float, longest: int, vocab: int) -> Job:
    """Tokens of a block are drawn from its hash, of what no block covers from the number."""
    block = max(1, int(BLOCK * factor))
    output = max(1, min(int(row["output_length"] * factor), longest - 1))
    length = max(1, min(int(row["input_length"] * factor), longest - output))
    parts = [_tokens(0, name, block, vocab) for name in row["hash_ids"][: length // block]]
    ids = np.concatenate([*parts, _tokens(1, number, length, vocab)])[:length]
    return Job(row["timestamp"] * 1e-3, ids.tolist(), output)


def _tokens(kind: int, name: int, count: int, vocab: int) -> np.ndarray:
    return np.random.default_rng([kind, name]).integers(0, vocab, count)


async def send(http: httpx.AsyncClient, job: Job) -> Reply:
    """One request, to its end."""
    body = {
        "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    reply, content = Reply(), json.dumps(body)
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    try:
        request = http.stream("POST", "/v1/completions", content=content, headers=headers)
        async with request as answer:
            if answer.status_code != 200:
                reply.error = f"{answer.status_code}: {(await answer.aread())[:200]!r}"
                return reply
            async for data in _events(answer):
                if data == b"[DONE]":
                    reply.is_done = True
                else:
                    reply.take(json.loads(data), time.perf_counter() - started)
    except httpx.HTTPError as error:
        reply.error = repr(error)
    reply.seconds = time.perf_counter() - started
    return reply


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for piece in answer.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].strip()


async def run_load(
    url: str, jobs: list[Job], *, concurrency: int | None, speed: float
) -> tuple[list[Reply], float]:
    """All replies, in the order of the jobs, and the seconds from the first to the last."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    gate = asyncio.Semaphore(concurrency or len(jobs))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        started = time.perf_counter()

        async def one(job: Job) -> Reply:
            if concurrency is None:
                await asyncio.sleep(job.arrival / speed - (time.perf_counter() - started))
            async with gate:
                return await send(http, job)

        replies = await asyncio.gather(*(one(job) for job in jobs))
        return list(replies), time.perf_counter() - started


def report(jobs: list[Job], replies: list[Reply], seconds: float) -> dict[str, Any]:
    """Figures of a load; failed requests are counted and otherwise left out."""
    faults = [reply.fault(job) for job, reply in zip(jobs, replies, strict=True)]
    whole = [reply for reply, fault in zip(replies, faults, strict=True) if not fault]
    first = [reply.times[0][0] * 1e3 for reply in whole]
    gaps = [
        (b[0] - a[0]) * 1e3 / b[1]
        for reply in whole
        for a, b in itertools.pairwise(reply.times)
        for _ in range(b[1])
    ]
    outputs = sum(tokens for reply in whole for _, tokens in reply.times)
    details = [reply.usage.get("prompt_tokens_details") or {} for reply in whole]
    cached = sum(x.get("cached_tokens") or 0 for x in details)
    prompts = sum(reply.usage["prompt_tokens"] for reply in whole)
    return {
        "requests": len(jobs),
        "failures": len(jobs) - len(whole),
        "faults": sorted({fault for fault in faults if fault})[:5],
        "seconds": round(seconds, 2),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "output_tokens": outputs,
        "output_tokens_per_s": round(outputs / seconds, 1),
        "prompt_tokens_per_s": round(prompts / seconds, 1),
        "first_token_ms": percentiles(first),
        "inter_token_ms": percentiles(gaps),
        "request_s": percentiles([reply.seconds for reply in whole]),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99; none of nothing."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(f"{x:.4g}") for p, x in zip(PERCENTILES, found, strict=True)}


@contextlib.contextmanager
def server(url: str | None, options: list[str]) -> Iterator[str]:
    """The given server's address, or that of one started here."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "hyradix", "serve", "--port", "0", *options]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http" not in line:
                raise SystemExit("the server did not start")
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()


def lines(results: dict[str, Any]) -> list[str]:
    """The figures as text."""
    found = [
        f"{results['requests']} requests, {results['failures']} failed, {results['seconds']} s, "
        f"lengths x {results['scale']:g}",
        f"output {results['output_tokens_per_s']} tokens/s; prompts "
        f"{results['prompt_tokens_per_s']} tokens/s, {results['cached_tokens']} of "
        f"{results['prompt_tokens']} cached",
    ]
    found += [f"FAULT {fault}" for fault in results["faults"]]
    for name in ("first_token_ms", "inter_token_ms", "request_s"):
        spelled = "  ".join(f"{key} {value}" for key, value in results[name].items())
        found.append(f"{name:15} {spelled}")
    return found


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="of a running server; default: start one")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--scale", type=float, default=0.25, help="of all lengths")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of prompt and reply")
    parser.add_argument("--vocab", type=int, default=8192, help="token ids are below this")
    parser.add_argument("--concurrency", type=int, help="a closed loop, in place of arrival times")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments[:cut])
    lengths = {"scale": args.scale, "longest": args.longest}
    jobs = read_jobs(args.trace, args.requests, **lengths, vocab=args.vocab)
    with server(args.base_url, arguments[cut + 1 :]) as url:
        load = run_load(url, jobs, concurrency=args.concurrency, speed=args.speed)
        replies, seconds = asyncio.run(load)
    results = {**lengths, **report(jobs, replies, seconds)}
    results |= {"concurrency": args.concurrency, "speed": args.speed}
    print("\n".join(lines(results)))
    if args.json is not None:
        save(args.json, results)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

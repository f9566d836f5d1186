"""O1 and O2 over HTTP: a crowded server says what one says that serves one request at a time.

Owns: drawing requests of every kind, sending them at once (some leave in the middle) or one by one,
comparing. The crowded server has little memory, preempts, and proves its invariants at every step;
the other has no prefix cache and one row. On a GPU a token may differ at a near tie: ``--allowed``.

    PYTHONPATH=.:src python -m tests.oracles.http_storm --requests 240 -- --device cuda
    PYTHONPATH=.:src python -m tests.oracles.http_storm --storm "--spec mtp --states 64"
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import save
from tests.support.real_server import RealServer

CROWDED = (
    "--kv-slots", "5000", "--states", "24", "--max-requests", "12", "--check-invariants",
    "--force-preempt-every", "9",
)  # fmt: skip
ALONE = ("--prefix-cache", "off", "--max-requests", "1")
CONCURRENCY = 32
KINDS = (
    "chat", "chat", "stream", "token ids", "seeded", "stop", "two", "leaves", "wrong", "logprobs",
)  # fmt: skip
WORDS = [
    "the", "sea", "wind", "ship", "captain", "storm", "letter", "garden", "river", "old", "stone",
    "lantern", "music", "winter", "bread", "market", "child", "bird", "promise", "door",
]  # fmt: skip
Reply = list[Any]


@dataclass(frozen=True)
class Job:
    """One request. leaves_after: events of its stream until the client is gone (None: it stays)."""

    kind: str
    path: str
    body: dict[str, Any]
    leaves_after: int | None = None


def draw(rng: random.Random, number: int, documents: list[str]) -> Job:
    """Any kind of request, most behind the beginning of a document that others have too."""
    kind = rng.choice(KINDS)
    document = rng.choice(documents)
    if rng.random() < 0.4:
        document = document[: rng.randrange(20, len(document))]
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 40, 90)), "temperature": 0}
    if kind == "token ids":
        prompt = [rng.randrange(10, 8000) for _ in range(rng.randrange(1, 1500))]
        return Job(kind, "/v1/completions", body | {"prompt": prompt, "ignore_eos": True})
    body["messages"] = [
        {"role": "system", "content": document},
        {"role": "user", "content": _text(rng, rng.randrange(3, 25))},
    ]
    if kind == "wrong":
        body[rng.choice(("max_tokens", "temperature", "top_p"))] = rng.choice((-1, "x", 1e9))
    body |= {
        "stream": {"stream": True},
        "leaves": {"stream": True, "max_tokens": 200},
        "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": number},
        "two": {"n": 2, "temperature": 0.7, "seed": number},
        "stop": {"stop": [rng.choice(("e", " the"))]},
        "logprobs": {"logprobs": True, "top_logprobs": 3},
    }.get(kind, {})
    leaves_after = rng.randrange(1, 12) if kind == "leaves" else None
    return Job(kind, "/v1/chat/completions", body, leaves_after)


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def jobs(count: int, seed: int) -> list[Job]:
    """The same for the same seed."""
    rng = random.Random(seed)
    documents = [_text(rng, num_words) for num_words in (30, 120, 400, 900)]
    return [draw(rng, number, documents) for number in range(count)]


async def ask(client: httpx.AsyncClient, job: Job) -> Reply | None:
    """(text, reason it ended) of each choice, or the status; None: the client left."""
    if not job.body.get("stream"):
        response = await client.post(job.path, json=job.body)
        if response.status_code != httpx.codes.OK:
            return [response.status_code]
        choices = response.json()["choices"]
        return [[x["text"] if "text" in x else x["message"]["content"], x["finish_reason"]]
                for x in choices]  # fmt: skip
    text, reason, num_events = "", None, 0
    async with client.stream("POST", job.path, json=job.body) as response:
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            num_events += 1
            if job.leaves_after is not None and num_events > job.leaves_after:
                return None
    return [[text, reason]]


async def serve(url: str, work: list[Job], concurrency: int) -> tuple[list[Reply | None], Any]:
    """What became of each, and the pools when all is over."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(job: Job) -> Reply | None:
            async with gate:
                return await ask(client, job)

        found = await asyncio.gather(*map(one, work))
        return list(found), await _idle_pools(client)


async def _idle_pools(client: httpx.AsyncClient) -> Any:
    """Those who left are taken out within a step or two."""
    for _ in range(100):
        pools = (await client.get("/v1/cache")).json()["pools"]
        if not any(pool["held"] for pool in pools.values()):
            break
        await asyncio.sleep(0.1)
    return pools


def run(count: int, seed: int, storm: list[str], shared: list[str]) -> dict[str, Any]:
    """Both servers, one after the other.

    storm: options of the crowded one; shared: of both.
    """
    work = jobs(count, seed)
    with RealServer(*CROWDED, *storm, *shared) as server:
        crowded, pools = asyncio.run(serve(server.url, work, CONCURRENCY))
        metrics = httpx.get(f"{server.url}/metrics").text
        log = server.errors
    staying = [i for i, job in enumerate(work) if job.leaves_after is None]
    with RealServer(*ALONE, *shared) as server:
        alone, _ = asyncio.run(serve(server.url, [work[i] for i in staying], 1))
    different = [
        {"number": i, "kind": work[i].kind, "crowded": crowded[i], "alone": expected}
        for i, expected in zip(staying, alone, strict=True)
        if crowded[i] != expected
    ]
    lines = (line.split() for line in metrics.splitlines())
    counts = {words[0]: words[1] for words in lines if len(words) == 2}
    return {
        "requests": dict(collections.Counter(job.kind for job in work)),
        "preemptions": int(float(counts["hyradix_preemptions_total"])),
        "pools": pools,
        "is_whole": all(
            pool["held"] == 0 and pool["free"] + pool["cached"] == pool["total"]
            for pool in pools.values()
        ),
        "errors": [line for line in log.splitlines() if "Traceback" in line or "ERROR" in line],
        "different": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--storm", default="", help="options of the crowded server, in one word")
    parser.add_argument("--allowed", type=int, default=0, help="differences")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of both servers, after --")
    args = parser.parse_args()
    found = run(args.requests, args.seed, args.storm.split(), args.options)
    print(json.dumps(found, indent=1))
    if args.json:
        save(args.json, found)
    is_right = found["is_whole"] and not found["errors"]
    return 0 if is_right and len(found["different"]) <= args.allowed else 1


if __name__ == "__main__":
    sys.exit(main())

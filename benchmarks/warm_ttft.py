"""Time to first token over HTTP: a prefix that is cached against one that is not.

    python benchmarks/warm_ttft.py [--base-url URL] [--json benchmarks/results/warm_ttft.json]

Each round draws a fresh prefix of 4,000 tokens, then asks 40-token questions about it:

- chat: the prefix is a system prompt. First question: cold. Second: warm (the end of a system
  prompt is a place where the engine keeps a state).
- ids: /v1/completions with token ids and nothing that says where the prefix ends. First question:
  cold. Second: finds the KV, but no state where the two part, and leaves one. Third: warm.

Cold and warm alternate, so that a noisy machine moves both. Time runs from sending the request to
the first event of the stream. Without --base-url a server with the demo model is started and
stopped. Exits with 1 if a ratio of medians is below --target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from figures import save, spread

TEXT = (
    "river stone garden window paper morning yellow travel music letter quiet market bread winter "
    "silver teacher forest number simple answer bridge animal summer doctor office kitchen story "
    "ocean planet circle friend engine report school village history science machine flower cloud"
)


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The given server's address, or that of one started here."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "hyradix", "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http" not in line:
                raise SystemExit("the server did not start")
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()


WORDS = TEXT.split()


class Asker:
    """Sends prompts and measures. ``rng`` makes texts that no one has sent before."""

    def __init__(self, http: httpx.Client, rng: random.Random) -> None:
        self._http = http
        self._rng = rng

    def ids(self, count: int) -> list[int]:
        """``count`` token ids of random words."""
        text = " ".join(self._rng.choices(WORDS, k=2 * count))
        reply = self._http.post("/tokenize", json={"prompt": text}).raise_for_status().json()
        tokens: list[int] = reply["tokens"]
        assert len(tokens) >= count
        return tokens[:count]

    def text(self, count: int) -> str:
        """Random words of ``count`` tokens."""
        reply = self._http.post("/detokenize", json={"tokens": self.ids(count)})
        return str(reply.raise_for_status().json()["prompt"])

    def first_token(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Milliseconds to the first event, and the usage that the stream ends with."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": 2, "temperature": 0}
        seconds, usage = 0.0, {}
        content = json.dumps(body)  # before the clock starts
        headers = {"Content-Type": "application/json"}
        start = time.perf_counter()
        with self._http.stream("POST", path, content=content, headers=headers) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                seconds = seconds or time.perf_counter() - start
                if line.startswith("data: {"):
                    usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
        return seconds * 1e3, usage


def chat_round(asker: Asker, prefix: int, question: int) -> list[tuple[float, dict[str, Any]]]:
    """Two questions under one system prompt."""
    system = {"role": "system", "content": asker.text(prefix)}
    questions = [asker.text(question) for _ in range(2)]
    return [
        asker.first_token(
            "/v1/chat/completions", {"messages": [system, {"role": "user", "content": text}]}
        )
        for text in questions
    ]


def ids_round(asker: Asker, prefix: int, question: int) -> list[tuple[float, dict[str, Any]]]:
    """Three continuations of one list of token ids."""
    start = asker.ids(prefix)
    prompts = [start + asker.ids(question) for _ in range(3)]
    return [asker.first_token("/v1/completions", {"prompt": prompt}) for prompt in prompts]


def report(name: str, rounds: list[list[tuple[float, dict[str, Any]]]]) -> dict[str, Any]:
    """Print and return the figures of one kind of request."""
    cold = [samples[0][0] for samples in rounds]
    warm = [samples[-1][0] for samples in rounds]
    ratio = statistics.median(cold) / statistics.median(warm)
    usages = [usage for _, usage in rounds[-1]]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    pairs = [c / w for c, w in zip(cold, warm, strict=True)]
    print(
        f"{name:5} cold {statistics.median(cold):7.1f} ms   warm {statistics.median(warm):6.1f} ms"
        f"   ratio {ratio:5.1f}   (pairs {min(pairs):.1f} to {max(pairs):.1f}; prompt "
        f"{usages[0]['prompt_tokens']} tokens, cached {', '.join(map(str, cached))})"
    )
    result = {"cold_ms": spread(cold), "warm_ms": spread(warm), "ratio": round(ratio, 1)}
    if len(usages) == 3:
        result["second_ms"] = spread([samples[1][0] for samples in rounds])
    result["ratio_of_pairs"] = spread(pairs)
    return result | {"prompt_tokens": usages[0]["prompt_tokens"], "cached_tokens": cached}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="of a running server; default: start one")
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--question", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--target", type=float, default=25.0)
    parser.add_argument("--seed", type=int, help="default: fresh prefixes in every run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = {"chat": chat_round, "ids": ids_round}
    rounds: dict[str, list[list[tuple[float, dict[str, Any]]]]] = {name: [] for name in kinds}
    with server(args.base_url) as url, httpx.Client(base_url=url, timeout=300) as http:
        asker = Asker(http, random.Random(args.seed))
        for number in range(args.rounds + 1):
            for name, run in kinds.items():
                samples = run(asker, args.prefix, args.question)
                if number:  # the first round warms up the client and the caches of the machine
                    rounds[name].append(samples)
    results = {name: report(name, some) for name, some in rounds.items()}
    if args.json is not None:
        save(args.json, results | {"rounds": args.rounds})
    return 0 if all(r["ratio"] >= args.target for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

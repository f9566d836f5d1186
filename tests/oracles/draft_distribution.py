"""The distribution of sampled tokens with drafts, against plain sampling: a chi-square test.

Owns: drawing the second to fourth tokens of many replies to one prompt, with seeds of their own,
and the test. Seeded output equals plain decode token for token (``drafts.py``); this test needs no
such equality: it would also pass other exact methods, and it fails a biased acceptance.

    PYTHONPATH=.:src python -m tests.oracles.draft_distribution --workers 2 --json OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hyradix.engine.engine import Engine
from hyradix.request import Int32Array, Int64Array, Request, SamplingParams
from hyradix.runner import runner
from hyradix.sampling.sampler import SampleResult
from hyradix.spec_decode.acceptance import Accepted, Candidates, TokenSampler, follow
from hyradix.text.chat_template import ChatTemplate
from tests.support.demo import DemoEngines

DRAWS = 20_000
PLACES = (1, 2, 3)
"""The second to the fourth token: the first comes from the prefill."""
MIN_EXPECTED = 8
"""Rarer tokens are put together."""
QUESTION = "Tell me something about animals."
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    **{
        name: {"spec": name, "spec_topk": 2, "spec_steps": 3, "spec_nodes": 8}
        for name in ("ngram", "mtp", "frozen_kv_mtp")
    },
}


@dataclass
class BiasedAcceptance:
    """A planted fault: now and then a draft is followed that is not what the target has drawn.

    In place of ``acceptance.follow``, and otherwise the same; the target's own draws are fair.
    """

    share: float

    def __call__(
        self, sampler: TokenSampler, logits: torch.Tensor, candidates: Candidates
    ) -> Accepted:
        """As ``follow``."""
        return follow(_Credulous(sampler, candidates, self.share), logits, candidates)


class _Credulous:
    """Of one step: stands at a node of each tree, and may say the first child's token there."""

    def __init__(self, sampler: TokenSampler, candidates: Candidates, share: float) -> None:
        self._sampler, self._share = sampler, share
        self._trees = {}
        parts = itertools.pairwise(candidates.cu_nodes.tolist())
        for row, (first, end) in zip(candidates.rows.tolist(), parts, strict=True):
            parents, tokens = candidates.parents[first:end], candidates.token_ids[first:end]
            self._trees[row] = (parents.tolist(), tokens.tolist())
        self._at = dict.fromkeys(self._trees, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(self, logits: torch.Tensor, rows: Int32Array, positions: Int64Array) -> SampleResult:
        """A fair draw, or a draft."""
        fair = self._sampler.sample(logits, rows, positions)
        tokens = fair.token_ids.copy()
        for j, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            parents, drafts = self._trees[row]
            children = {drafts[i]: i for i in range(len(parents)) if parents[i] == self._at[row]}
            noise = np.random.default_rng((int(self._seeds[row]), position)).random()
            if children and int(tokens[j]) not in children and noise < self._share:
                tokens[j] = next(iter(children))
            self._at[row] = children.get(int(tokens[j]), 0)
        return SampleResult(tokens, fair.is_faulty, fair.logprobs)


@dataclass(frozen=True)
class Job:
    """A part of the draws of one way."""

    way: str
    first_seed: int
    count: int
    is_biased: bool = False
    share: float = 0.06


def draw(engines: DemoEngines, job: Job) -> list[Counter[int]]:
    """Counts of the tokens at each of ``PLACES``."""
    engine = engines.make(max_requests=32, num_threads=1, spec_state="auto", **WAYS[job.way])
    biased = BiasedAcceptance(job.share) if job.is_biased else follow
    with patch.object(runner, "follow", biased):
        return _draw(engine, engines, job)


def _draw(engine: Engine, engines: DemoEngines, job: Job) -> list[Counter[int]]:
    template = ChatTemplate.from_dir(engines.directory, engines.tokenizer)
    prompt = template.render([{"role": "user", "content": QUESTION}]).token_ids
    counts: list[Counter[int]] = [Counter() for _ in PLACES]
    replies: dict[str, list[int]] = {}
    left = iter(range(job.first_seed, job.first_seed + job.count))
    is_done = False
    while not is_done or engine.has_work():
        while not is_done and len(replies) < 32:
            seed = next(left, None)
            is_done = seed is None
            if seed is not None:
                replies[str(seed)] = []
                assert engine.add(_request(prompt, seed)) is None
        for output in engine.step():
            replies[output.request_id] += output.token_ids
            if output.is_finished:
                tokens = replies.pop(output.request_id)
                for count, place in zip(counts, PLACES, strict=True):
                    count[tokens[place] if place < len(tokens) else -1] += 1
    return counts


def _request(prompt: Any, seed: int) -> Request:
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
    ids = np.asarray(prompt, dtype="<i4").tobytes()
    return Request(request_id=str(seed), prompt_token_ids=ids, sampling=params, seed=seed)


def p_value(one: Counter[int], other: Counter[int]) -> float:
    """Of a two-sample chi-square test; rare tokens together. Upper tail by Wilson and Hilferty."""
    total = one.total() + other.total()
    groups: dict[int, list[int]] = {}
    for token in one | other:
        both = one[token] + other[token]
        is_rare = both * min(one.total(), other.total()) / total < MIN_EXPECTED
        group = groups.setdefault(-2 if is_rare else token, [0, 0])
        group[0] += one[token]
        group[1] += other[token]
    statistic = 0.0
    for first, second in groups.values():
        for seen, share in ((first, one.total() / total), (second, other.total() / total)):
            expected = (first + second) * share
            statistic += (seen - expected) ** 2 / expected
    freedom = max(len(groups) - 1, 1)
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


_engines: DemoEngines | None = None


def _work(job: Job) -> tuple[Job, list[Counter[int]]]:
    global _engines
    _engines = _engines or DemoEngines()
    return job, draw(_engines, job)


def main() -> None:
    """The recorded run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started, part = time.monotonic(), max(args.draws // 8, 1)
    jobs = [
        Job(way, (10 * number + 1) * args.draws + first, min(part, args.draws - first))
        for number, way in enumerate(WAYS)
        for first in range(0, args.draws, part)
    ]
    jobs += [Job("mtp", 90 * args.draws + f, part, True) for f in range(0, args.draws, part)]
    counts: dict[tuple[str, bool], list[Counter[int]]] = {}
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for job, found in pool.imap_unordered(_work, jobs, chunksize=1):
            whole = counts.setdefault((job.way, job.is_biased), [Counter() for _ in PLACES])
            for total, one in zip(whole, found, strict=True):
                total.update(one)
    plain = counts["plain", False]
    result: dict[str, Any] = {"draws": args.draws}
    for (way, is_biased), found in counts.items():
        if way != "plain":
            name = f"{way} with a planted bias" if is_biased else way
            pairs = zip(plain, found, strict=True)
            result[name] = [p_value(one, other) for one, other in pairs]
    result["seconds"] = time.monotonic() - started
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

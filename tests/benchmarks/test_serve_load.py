"""The HTTP load: prompts of the trace, what a whole stream is, a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serve_load import TRACE, Job, Reply, main, percentiles, read_jobs, report


def test_prompts_share_what_the_trace_shares() -> None:
    jobs = read_jobs(TRACE, 30, scale=0.1, longest=2000, vocab=500)
    assert all(len(job.prompt) + job.max_tokens <= 2000 for job in jobs)
    assert jobs[0].prompt[:51] == jobs[1].prompt[:51]
    assert jobs[0].prompt[:102] != jobs[1].prompt[:102]
    assert (len(jobs[0].prompt), jobs[0].max_tokens) == (675, 50)
    assert max(max(job.prompt) for job in jobs) < 500
    assert jobs == read_jobs(TRACE, 30, scale=0.1, longest=2000, vocab=500)


def whole() -> Reply:
    reply = Reply()
    for tokens, at in (([1], 0.1), ([2, 3], 0.3)):
        reply.take({"choices": [{"token_ids": tokens, "finish_reason": None}]}, at)
    reply.take({"choices": [{"token_ids": [], "finish_reason": "length"}]}, 0.3)
    reply.take({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}, 0.3)
    reply.is_done = True
    return reply


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"is_done": False}, "the stream ends: False, not True"),
        ({"finish_reason": "stop"}, "finish_reason: stop, not length"),
        ({"times": [(0.1, 1)]}, "tokens: 1, not 3"),
        ({"usage": {}}, "usage.completion_tokens: None, not 3; usage.prompt_tokens: None, not 2"),
        ({"error": "500"}, "500"),
        ({}, ""),
    ],
)
def test_faults_of_a_stream(change: dict[str, object], fault: str) -> None:
    reply, job = whole(), Job(0.0, [1, 2], 3)
    for name, value in change.items():
        setattr(reply, name, value)
    assert reply.fault(job) == fault


def test_figures_leave_failures_out() -> None:
    job, broken = Job(0.0, [1, 2], 3), whole()
    broken.is_done = False
    figures = report([job, job], [whole(), broken], 2.0)
    assert (figures["failures"], figures["output_tokens"]) == (1, 3)
    assert figures["output_tokens_per_s"] == 1.5
    assert figures["first_token_ms"]["p50"] == 100.0
    assert figures["inter_token_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert percentiles([]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arrival", [["--concurrency", "3"], ["--speed", "1000"]])
def test_a_real_server(server_url: str, tmp_path: Path, arrival: list[str]) -> None:
    out = tmp_path / "load.json"
    sizes = ["--requests", "4", "--scale", "0.01", "--longest", "200"]
    assert main(["--base-url", server_url, *sizes, *arrival, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert results["failures"] == 0
    assert results["output_tokens_per_s"] > 0
    assert main(["--base-url", server_url, *sizes, "--longest", "100000", "--scale", "2"]) == 1

"""The simulation of ``hyradix bench cache``: hand-made workloads, every number known beforehand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.cache.invariants import check_idle
from hyradix.engine.bench_cache import BenchOptions, ClosedLoop, bench_cache
from hyradix.engine.bench_workload import WorkloadRequest, read_workload
from hyradix.errors import ConfigError
from hyradix.scheduler.leaping import LeapingScheduler


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 32_000, size=count, dtype=np.int32)


def request(
    prompt: np.ndarray, output: np.ndarray, parent: int = -1, marks: tuple[int, ...] = ()
) -> WorkloadRequest:
    return WorkloadRequest(prompt.astype("<i4").tobytes(), output, parent, marks)


def run(workload: list[WorkloadRequest], **options: Any) -> tuple[ClosedLoop, list[int]]:
    """The loop, and each request's cached tokens by index."""
    loop = ClosedLoop(workload, BenchOptions(**{"kv_slots": 0, "states": 0, **options}))
    loop.run()
    check_idle(loop.cache)
    by_index = sorted(loop.finished, key=lambda state: int(state.request_id))
    return loop, [state.num_cached_tokens for state in by_index]


def test_the_same_prompt_again_resumes_before_its_last_token() -> None:
    loop, cached = run([request(ids(0, 100), ids(1, 5)), request(ids(0, 100), ids(2, 5))])
    assert cached == [0, 99]
    report = loop.report(1.0)
    assert report["hit_ratio"] == pytest.approx(99 / 200)
    assert (report["prompt_tokens"], report["cached_tokens"]) == (200, 99)
    assert report["miss_reasons"] == {"cold": 1, "none": 1}
    assert report["steps"] == 2 * 5, "a prefill gives the first token, each decode one more"


def test_a_reply_is_donated_without_its_last_token() -> None:
    prompt, reply = ids(0, 100), ids(1, 20)
    turn = np.concatenate([prompt, reply, ids(2, 30)])
    assert run([request(prompt, reply), request(turn, ids(3, 4), 0)])[1] == [0, 119]


def test_marks_are_boundaries_and_may_be_ignored() -> None:
    system = ids(0, 200)
    workload = [
        request(np.concatenate([system, ids(s, 50)]), ids(s, 4), marks=(200,)) for s in (1, 2, 3)
    ]
    assert run(workload)[1] == [0, 200, 200]
    assert run(workload, use_marks=False)[1] == [0, 0, 200], "the second leaves it where they part"


def test_one_state_is_enough_to_run_and_to_continue_a_chat() -> None:
    """The only slot is the working state: nothing but a reply's end can stay, and it is moved."""
    prompt, reply = ids(0, 100), ids(1, 20)
    turn = np.concatenate([prompt, reply, ids(2, 30)])
    loop, cached = run(
        [request(prompt, reply), request(turn, ids(3, 4), 0), request(prompt, ids(4, 4))], states=1
    )
    assert cached == [0, 119, 0]
    report = loop.report(1.0)
    assert report["moved_states"] == 1
    assert report["evictions"] == {"kv": 0, "states": 1}
    assert report["peak"]["states"] == 1
    assert report["miss_reasons"] == {"cold": 1, "no_slot": 1, "none": 1}


def test_peak_counts_the_running_request() -> None:
    loop, _ = run([request(ids(0, 100), ids(1, 20))])
    assert loop.peak_kv == 120, "prompt, and what 16 at a time reserves of the reply, at most all"
    assert loop.peak_states == 2, "the working state and the prompt's end"


def test_a_child_waits_for_its_parent_and_others_pass() -> None:
    prompt, reply = ids(0, 100), ids(1, 50)
    turn = np.concatenate([prompt, reply, ids(2, 30)])
    loop, cached = run(
        [request(prompt, reply), request(turn, ids(3, 4), 0), request(ids(9, 40), ids(4, 4))],
        concurrency=2,
    )
    assert cached == [0, 149, 0], "had it not waited it would have resumed at 99"
    assert [state.request_id for state in loop.finished] == ["2", "0", "1"]
    assert loop.scheduler.now == 50 + 4


def test_concurrency_is_a_closed_loop() -> None:
    """Lengths 10, 4, 4 at concurrency 2: the third enters when the second ends."""
    workload = [request(ids(s, 20), ids(s, m)) for s, m in ((0, 10), (1, 4), (2, 4))]
    loop, _ = run(workload, concurrency=2)
    assert [state.request_id for state in loop.finished] == ["1", "2", "0"]
    assert loop.scheduler.now == 10
    assert run(workload)[0].scheduler.now == 18


def test_concurrent_twins_share_one_prefill() -> None:
    workload = [request(ids(0, 100), ids(s, 8)) for s in (1, 2)]
    assert run(workload, concurrency=2)[1] == [0, 99]


def test_unlimited_means_nothing_is_evicted_or_skipped() -> None:
    workload = [request(ids(s, 3000), ids(s, 5), marks=(1000, 2000)) for s in range(6)]
    loop, cached = run(workload + workload, concurrency=3)
    report = loop.report(1.0)
    assert report["evictions"] == {"kv": 0, "states": 0}
    assert (report["skipped_saves"], report["preemptions"]) == (0, 0)
    assert cached == [0] * 6 + [2999] * 6


@pytest.mark.parametrize("options", [{}, {"kv_slots": 1 << 50, "states": 1 << 50}])
def test_no_more_is_made_than_could_be_used(options: dict[str, int]) -> None:
    workload = [request(ids(s % 3, 200), ids(s, 9), marks=(50,)) for s in range(9)]
    loop, cached = run(workload, concurrency=1 << 50, **options)
    assert loop.config.num_kv_slots <= 9 * (209 + 16)
    assert loop.config.num_states < 2 * loop.config.num_kv_slots
    assert loop.cache.counters.skipped_saves == 0
    assert sorted(cached) == [0] * 3 + [199] * 6


def test_kv_runs_short_so_old_prefixes_go() -> None:
    workload = [request(ids(s, 100), ids(s, 4)) for s in (0, 1, 2, 0)]
    loop, cached = run(workload, kv_slots=250)
    assert cached == [0, 0, 0, 0]
    assert loop.report(1.0)["evictions"] == {"kv": 206, "states": 4}
    assert loop.report(1.0)["miss_reasons"] == {"cold": 3, "evicted": 1}


def test_the_report_is_json_with_everything_that_is_promised() -> None:
    workload = [request(ids(s, 100), ids(s, 5)) for s in range(4)]
    report: Any = bench_cache(workload, BenchOptions(kv_slots=250, states=2))
    assert json.loads(json.dumps(report)) == report
    assert set(report) >= {
        *("hit_ratio", "prompt_tokens", "cached_tokens", "op_us", "peak", "evictions"),
        "miss_reasons",
    }
    assert set(report["peak"]) == set(report["evictions"]) == {"kv", "states"}
    assert set(report["op_us"]) == {
        *("match", "lock", "insert", "finish", "evict_state", "evict_kv")
    }
    for times in report["op_us"].values():
        assert 0 < times["p50"] <= times["p99"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    concurrency=st.integers(1, 4),
    kv_slots=st.sampled_from([0, 260, 400, 900]),
    states=st.sampled_from([0, 4, 5, 9]),
)
def test_leaps_come_out_as_single_steps_would(
    seed: int, count: int, concurrency: int, kv_slots: int, states: int
) -> None:
    """Also where KV runs short and requests are preempted."""
    rng = np.random.default_rng(seed)
    workload: list[WorkloadRequest] = []
    for index in range(count):
        parent = int(rng.integers(-1, index)) if index and rng.random() < 0.6 else -1
        head = ids(int(rng.integers(0, 3)), int(rng.integers(1, 90)))
        if parent >= 0:
            before = workload[parent]
            head = np.concatenate([np.frombuffer(before.prompt, dtype="<i4"), before.output])[:150]
        prompt = np.concatenate([head, ids(100 + index, int(rng.integers(1, 30)))])
        output = ids(200 + index, int(rng.integers(1, 80)))
        workload.append(request(prompt, output, parent, (len(head),)))
    options = {"kv_slots": kv_slots, "states": states, "concurrency": concurrency}
    leaping, cached = run(workload, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeapingScheduler, "_longest_leap", lambda self: 1)
        single, expected = run(workload, **options)
    assert cached == expected
    assert [s.request_id for s in leaping.finished] == [s.request_id for s in single.finished]
    ours, theirs = leaping.report(0.0), single.report(0.0)
    del ours["op_us"], theirs["op_us"]
    assert ours == theirs


# ---- files -------------------------------------------------------------------------------------


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_workload_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        {"prompt": [1, 2, 3], "output": [4], "parent": -1, "marks": [2]},
        {"prompt": [1, 2, 3, 4, 5], "output": [6, 7], "parent": 0, "marks": []},
    )
    first, second = read_workload(path)
    assert np.frombuffer(first.prompt, dtype="<i4").tolist() == [1, 2, 3]
    assert (first.output.tolist(), first.parent, first.marks) == ([4], -1, (2,))
    assert (second.num_prompt_tokens, second.parent) == (5, 0)
    assert len(read_workload(path, limit=1)) == 1


@pytest.mark.parametrize("block", [64, 512])
def test_a_trace_file(tmp_path: Path, block: int) -> None:
    rows = [
        {"input_length": 3 * block - 5, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"input_length": 2 * block, "output_length": 0, "hash_ids": [1, 4]},
        {"input_length": 64_001, "output_length": 1, "hash_ids": list(range(64_001 // block + 1))},
    ]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = read_workload(path, seed=3)
    assert (first.num_prompt_tokens, len(first.output)) == (3 * block - 5, 9)
    assert (second.num_prompt_tokens, len(second.output)) == (2 * block, 1)
    assert first.prompt[: 4 * block] == second.prompt[: 4 * block]
    assert first.prompt[4 * block :][:8] != second.prompt[4 * block :][:8]
    expected = np.random.default_rng([7, 1]).integers(10, 32_000, size=block, dtype=np.int32)
    assert first.prompt[: 4 * block] == expected.tobytes()
    replies = [read_workload(path, seed=seed)[0].output.tolist() for seed in (3, 4)]
    assert first.output.tolist() == replies[0] != replies[1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no requests"),
        ([{"text": "a"}], "neither a workload"),
        ([{"input_length": 9, "output_length": 1, "hash_ids": [3, -1]}], "line 1: Expected `int`"),
        ([[1, 2]], "neither a workload"),
        ([{"prompt": [], "output": [1]}], "line 1: prompt and output must not be empty"),
        ([{"prompt": [1], "output": [2], "parent": 0}], "line 1: parent must be -1 or"),
        ([{"prompt": [-1], "output": [2]}], "token ids must be between"),
        ([{"prompt": [1], "output": [2**31]}], "token ids must be between"),
        ([{"prompt": [1], "output": [2]}, {"prompt": "x", "output": [1]}], "line 2: Expected"),
    ],
)
def test_bad_files(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workload(write(tmp_path / "w.jsonl", *rows))


@pytest.mark.parametrize(
    ("content", "message"), [(b"{nonsense", "line 1: "), (b"\x1f\x8b broken", "cannot read")]
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_workload(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_workload(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_slots": -1}, "--kv-slots must not be negative"),
        ({"states": -1}, "--states must not be negative"),
        ({"concurrency": 0}, "--concurrency must be positive"),
        ({"states": 1, "concurrency": 2}, "--states 1 is less than --concurrency 2"),
        ({"policy": "best"}, "--policy must be one of"),
        ({"kv_slots": 10}, "request 0 can never run: the request needs 105 KV slots"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    workload = [request(ids(s, 100), ids(s, 5)) for s in (0, 1)]
    with pytest.raises(ConfigError, match=message):
        run(workload, **options)

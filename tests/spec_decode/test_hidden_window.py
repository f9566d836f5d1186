"""What a draft layer missed: how it is remembered, and that it catches up as if it had followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.kernels.ops import load_ops
from hyradix.models.decoder import Decoder
from hyradix.runner.runner import ModelRunner
from hyradix.spec_decode.hidden_window import WINDOW, HiddenWindow
from tests.spec_decode.following import (
    PROMPT,
    Following,
    Pattern,
    Seen,
    WatchedEngines,
    request_of,
    serve,
)

# ---- the window ---------------------------------------------------------------------------------


class Window:
    """A hidden state is (row, position): what is taken tells where it came from."""

    def __init__(self, num_rows: int) -> None:
        self.held = HiddenWindow(num_rows, load_ops("torch"))

    def pass_over(self, **parts: tuple[int, int]) -> None:
        """``r1=(4, 6)``: row 1 consumes positions 4 and 5."""
        rows = np.array([int(name[1:]) for name in parts], np.int32)
        begins, ends = np.array(list(parts.values()), np.int32).T
        counts = np.minimum(ends - begins, WINDOW).astype(np.int32)
        each = [
            (float(row), float(position))
            for row, end, count in zip(rows, ends, counts, strict=True)
            for position in range(end - count, end)
        ]
        alone = bool((counts == 1).all())
        self.held.pass_over(rows, ends.copy(), torch.tensor(each), None if alone else counts)

    def take(self, **starts: int) -> dict[str, list[int]]:
        """The positions missed by each row."""
        rows = np.array([int(name[1:]) for name in starts], np.int32)
        at = np.array(list(starts.values()), np.int32)
        if not self.held.has_any(rows, at):
            return {name: [] for name in starts}
        raw, counts = self.held.take(rows, at)
        parts = np.split(raw.numpy(), np.cumsum(counts)[:-1])
        for row, part in zip(rows, parts, strict=True):
            assert (part[:, 0] == row).all()
        return {n: p[:, 1].astype(int).tolist() for n, p in zip(starts, parts, strict=True)}


def test_each_row_gets_what_stands_right_before_it_in_order() -> None:
    window = Window(4)
    window.pass_over(r2=(0, 5), r0=(7, 8))
    window.pass_over(r0=(8, 9), r2=(5, 6))
    window.pass_over(r2=(6, 9), r3=(0, 1))
    assert window.take(r0=9, r1=4, r2=9) == {"r0": [7, 8], "r1": [], "r2": list(range(9))}
    assert window.take(r0=9, r2=9) == {"r0": [], "r2": []}, "given out once"
    assert window.take(r3=1) == {"r3": [0]}


def test_nothing_behind_a_gap_is_taken() -> None:
    window = Window(2)
    window.pass_over(r0=(3, 6), r1=(0, 1))
    assert window.take(r0=6) == {"r0": [3, 4, 5]}
    window.pass_over(r0=(9, 10))
    window.pass_over(r0=(10, 12))
    assert window.take(r0=11) == {"r0": []}, "it ends elsewhere"
    assert window.take(r0=12) == {"r0": [9, 10, 11]}


def test_what_another_request_left_in_the_row_is_not_taken() -> None:
    window = Window(2)
    window.pass_over(r0=(0, 9), r1=(0, 2))
    window.held.enter(0)
    assert window.take(r0=9) == {"r0": []}
    window.pass_over(r0=(9, 11))
    assert window.take(r0=11, r1=2) == {"r0": [9, 10], "r1": [0, 1]}


def test_only_the_last_of_a_long_prompt_and_of_many_steps_is_remembered() -> None:
    window = Window(2)
    window.pass_over(r0=(0, 200))
    window.pass_over(r0=(200, 201))
    assert window.take(r0=201) == {"r0": list(range(201 - WINDOW, 201))}
    for end in range(1, 2 * WINDOW):
        window.pass_over(r1=(end - 1, end))
    last = 2 * WINDOW - 1
    assert window.take(r1=last) == {"r1": list(range(last - WINDOW, last))}


def test_short_requests_beside_a_row_do_not_push_out_what_it_missed() -> None:
    window, held = Window(2), 0
    for step in range(40):
        window.held.enter(1)
        window.pass_over(r0=(step, step + 1), r1=(0, WINDOW))
        held = max(held, sum(len(part.raw) for part in window.held._steps))
    assert held <= 2 * 2 * WINDOW
    assert window.take(r0=40, r1=WINDOW) == {"r0": list(range(40)), "r1": list(range(WINDOW))}


@pytest.mark.parametrize("seed", range(4))
def test_the_window_against_a_list_for_each_row(seed: int) -> None:
    rng, window, num_rows = np.random.default_rng(seed), Window(4), 4
    missed: list[list[int]] = [[] for _ in range(num_rows)]
    at = [0] * num_rows
    for _ in range(300):
        parts = {}
        for row in rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)].tolist():
            if rng.random() < 0.05:
                at[row], missed[row] = int(rng.integers(0, 9)), []
                window.held.enter(row)
            count = int(rng.choice([1, 1, 1, 1, 5, 80]))
            if rng.random() < 0.2:
                found = window.take(**{f"r{row}": at[row]})[f"r{row}"]
                assert found == missed[row][len(missed[row]) - len(found) :]
                assert len(found) <= WINDOW
                assert len(found) >= min(len(missed[row]), 12), "few steps ago"
                at[row], missed[row] = at[row] + count, []
                continue
            parts[f"r{row}"] = (at[row], at[row] + count)
            missed[row] += range(at[row], at[row] + count)
            at[row] += count
        if parts:
            window.pass_over(**parts)
        assert sum(len(step.raw) for step in window.held._steps) == window.held._num_held
        assert window.held._num_held <= 2 * num_rows * WINDOW


# ---- catching up --------------------------------------------------------------------------------

TEXT = (
    "Once upon a time there was a small fox who lived at the edge of a large forest. One day it met"
    " an old owl, who told it a story about the river and the sea."
)
CHAIN = {"spec": "mtp", "spec_steps": 4}
TREE = {"spec": "mtp", "spec_topk": 2, "spec_steps": 3, "spec_nodes": 8}
PATTERNS: dict[str, Pattern] = {
    "gaps": lambda seed, depth: depth == PROMPT or (depth // 6) % 2 == seed % 2,
    "prompts passed over": lambda seed, depth: seed == 1 or (depth >= 0 and (depth // 5) % 2 == 1),
    "now and then": lambda seed, depth: seed == 1 if depth == PROMPT else depth % 5 < 3,
}


@pytest.fixture(scope="module")
def engines() -> WatchedEngines:
    """Torch's kernels: the compiled ones round to the weights' type from some number of rows on."""
    return WatchedEngines(backend="torch")


def run(
    engines: WatchedEngines,
    pattern: Pattern,
    rounds: set[tuple[int, int]] | None,
    **options: object,
) -> tuple[dict[int, list[int]], Seen]:
    """Four requests in three rows; the last one resumes at the last token of the first one's
    prompt, and all of it that the tree holds."""
    ids = np.asarray(engines.tokenizer.encode(TEXT)).tolist()
    first = ids[:36]
    prompts = [first, ids[2:11], ids[4:7], first[:-1] + ids[3:8]]
    requests = [request_of(i + 1, prompt, 13) for i, prompt in enumerate(prompts)]
    engine = engines.make(num_threads=1, max_requests=3, kv_slots=256, **options)
    Following(engine, pattern, rounds)
    replies = serve(engine, requests, every=2)
    assert (engine.scheduler.counters.cached_tokens > 0) == options.get("prefix_cache", True)
    return replies, engines.last.seen


@pytest.mark.parametrize(
    ("name", "mode", "shape", "chunk", "others"),
    [
        ("gaps", "snapshot", CHAIN, 0, {}),
        ("gaps", "log", TREE, 7, {"track_interval": 4}),
        ("gaps", "replay", CHAIN, 3, {"overlap": True}),
        ("prompts passed over", "snapshot", TREE, 7, {}),
        ("prompts passed over", "log", CHAIN, 3, {"prefix_cache": False}),
        ("now and then", "snapshot", CHAIN, 7, {}),
    ],
)
def test_a_row_that_is_followed_again_is_as_if_it_had_always_been(
    engines: WatchedEngines, name: str, mode: str, shape, chunk: int, others
) -> None:
    options = {**shape, "spec_state": mode, "max_prefill_tokens": chunk, **others}
    replies, seen = run(engines, PATTERNS[name], None, **options)
    expected, always = run(engines, lambda *_: True, set(seen.drafts), **options)
    assert replies == expected
    assert len(seen.drafts) >= 8
    assert seen.drafts == always.drafts
    for at, kv in seen.kv.items():
        assert torch.allclose(kv, always.kv[at], rtol=0.0, atol=1e-5), at


@pytest.mark.parametrize("mode", ["snapshot", "replay", "log"])
def test_outputs_are_those_of_plain_decode_whoever_is_followed(
    engines: WatchedEngines, mode: str
) -> None:
    """Greedy and seeded, with preemption, one that is aborted, and rows that are used again."""
    ids = np.asarray(engines.tokenizer.encode(TEXT)).tolist()
    requests = [
        request_of(i + 1, ids[: 5 + 3 * i], 12, temperature=0.9 * (i % 2)) for i in range(5)
    ]
    plain = serve(engines.make(num_threads=1, max_requests=1, prefix_cache=False), requests)
    engine = engines.make(
        num_threads=1, max_requests=2, spec_state=mode, force_preempt_every=9, **CHAIN
    )
    Following(engine, PATTERNS["now and then"], None)
    found = serve(engine, requests, every=2, aborts={2: 9})
    assert len(found[2]) < 12
    assert found == {**plain, 2: plain[2][: len(found[2])]}


@pytest.mark.parametrize("chunk", [0, 70, 3])
def test_of_a_long_prompt_that_is_passed_over_only_its_end_is_computed_to_the_end(
    engines: WatchedEngines, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than the window, which their drafts begin with: as where all hidden states
    are computed, and fewer are."""
    ids = np.asarray(engines.tokenizer.encode(TEXT)).tolist() * 4
    first = ids[: 2 * WINDOW + 9]
    prompts = [first, ids[7 : WINDOW + 13], ids[4:7], first[:-1] + ids[3:8]]
    requests = [request_of(i + 1, prompt, 9) for i, prompt in enumerate(prompts)]
    forward, found = Decoder.forward, []
    for wants_all in (False, True):
        counts: list[int] = []

        def counted(model, token_ids, context, wanted=None, counts=counts):
            hidden = forward(model, token_ids, context, wanted)
            counts.append(len(hidden))
            return hidden

        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "forward", counted)
            if wants_all:
                patched.setattr(ModelRunner, "_wanted", lambda *_: None)
            options = {"num_threads": 1, "max_requests": 3, "max_prefill_tokens": chunk, **CHAIN}
            engine = engines.make(**options)
            Following(engine, lambda _, depth: depth != PROMPT, None)
            found.append((serve(engine, requests, every=2), engines.last.seen, sum(counts)))
    (ours, seen, few), (whole, of_all, many) = found
    assert ours == whole
    assert len(seen.drafts) >= 8
    assert seen.drafts == of_all.drafts
    assert seen.kv.keys() == of_all.kv.keys()
    for at, kv in seen.kv.items():
        assert torch.allclose(kv, of_all.kv[at], rtol=0.0, atol=1e-5), at
    assert few < many or chunk == 3

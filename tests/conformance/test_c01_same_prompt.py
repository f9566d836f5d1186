"""C1, C10: the same prompt again, and one more token, at lengths around every multiple."""

from __future__ import annotations

import pytest

from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

INTERVAL = 96
AROUND = [1, 2, 3, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257]


def prompt_positions(h: Driver, first_step: int, n: int) -> list[int]:
    """Prompt positions computed since ``first_step``, in order."""
    return [
        position
        for batch in h.runner.log[first_step:]
        for start, count in zip(batch.starts.tolist(), batch.num_tokens.tolist(), strict=True)
        for position in range(start, start + count)
        if position < n
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("n", AROUND)
def test_c1_the_second_resumes_at_the_last_token(n: int, chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, track_interval=INTERVAL, overlap=overlap))
    prompt = text(n, n)
    first = h.serve(prompt, 3)
    assert cached(first) == (0, 0)
    before = len(h.runner.log)
    second = h.serve(prompt, 3)
    assert cached(second) == (n - 1, n - 1)
    assert second.output == first.output
    prefill = h.runner.log[before]
    assert prefill.starts.tolist() == [n - 1], "the last token is computed, and once"
    assert prefill.num_tokens.tolist() == [1]
    assert prompt_positions(h, before, n) == [n - 1]
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("n", [64, 128, 192, INTERVAL, 2 * INTERVAL])
def test_c10_a_prefill_of_exactly_one_token(n: int, chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, track_interval=INTERVAL, overlap=overlap))
    whole = text(n, n + 1)
    h.serve(whole[:n], 1)
    assert depths_along(h.cache.tree, whole)[-1] == n
    before = len(h.runner.log)
    record = h.serve(whole, 4)
    assert cached(record) == (n, n)
    prefill = h.runner.log[before]
    assert (prefill.starts.tolist(), prefill.num_tokens.tolist()) == ([n], [1])
    assert prefill.write_from.tolist() == [n]
    assert record.output == Driver(make_config(prefix_cache=False)).serve(whole, 4).output
    h.close()


@pytest.mark.parametrize("chunk", [1, *CHUNKS])
def test_prompts_that_differ_in_the_last_token_only(chunk: int) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk))
    base = text(1, 40)
    h.serve(base, 2)
    for last in (7, 8, 9):
        record = h.serve([*base[:-1], last], 2)
        assert cached(record) == (39, 39)
    h.close()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_shortest_prompts(n: int, max_tokens: int) -> None:
    h = Driver(make_config(max_prefill_tokens=1, kv_slots=n + max_tokens, max_context=8, states=8))
    for _ in range(3):
        record = h.serve(text(n, n), max_tokens)
        assert len(record.output) == max_tokens
    assert record.state.num_cached_tokens == n - 1
    h.close()

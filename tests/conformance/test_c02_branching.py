"""C2, C4: many requests that share a prefix which ends nowhere in particular."""

from __future__ import annotations

import pytest

from hyradix.request import Boundary, BoundaryKind, MissReason
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

MODES = [(chunk, overlap) for chunk in CHUNKS for overlap in (False, True)]


@pytest.mark.parametrize(("chunk", "overlap"), MODES)
@pytest.mark.parametrize("a", [37, 101, 256 + 5, 403])
def test_c2_the_third_resumes_at_the_branch(a: int, chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    shared = text(a, a)
    first, second, third = (shared + text(1000 + i, 301 + i) for i in range(3))
    assert cached(h.serve(first, 3)) == (0, 0)
    under = max((d for d in depths_along(h.cache.tree, first) if d <= a), default=0)
    record = h.serve(second, 3)
    assert cached(record) == (under, a)
    assert record.state.miss_reason is MissReason.NEVER_PLACED
    assert a in depths_along(h.cache.tree, second)
    record = h.serve(third, 3)
    assert cached(record) == (a, a)
    assert record.state.miss_reason is MissReason.NONE
    h.close()


@pytest.mark.parametrize(("chunk", "overlap"), MODES)
def test_c2_a_boundary_serves_the_second_already(chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    shared = text(1, 150)
    marks = [Boundary(60, BoundaryKind.SYSTEM), Boundary(110, BoundaryKind.TURN)]
    h.serve(shared + text(2, 310), 3, boundaries=marks)
    assert cached(h.serve(shared + text(3, 320), 3)) == (110, 150)
    assert cached(h.serve(shared[:60] + text(4, 320), 3)) == (60, 60)
    assert cached(h.serve(shared + text(5, 320), 3)) == (150, 150)
    h.close()


@pytest.mark.parametrize("min_gain", [32, 0, 1])
@pytest.mark.parametrize(("chunk", "overlap"), MODES)
def test_c4_short_prompts_hit_from_the_third_on(chunk: int, overlap: bool, min_gain: int) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap, min_gain=min_gain, states=12))
    shared = text(1, 40)
    hits = [h.serve(shared + text(10 + i, 5 + i % 7), 2).state.num_cached_tokens for i in range(30)]
    assert hits == [0, 0] + [40] * 28, "also when the pool has long been full"
    assert h.cache.counters.evicted_states > 0
    h.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [96, 16], ids=["below a ladder", "short"])
def test_the_end_of_a_chunk_stays_when_somebody_resumed_from_it(chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    prompt = text(1, 4 * chunk + 6)
    first = h.add(prompt, 3)
    for _ in range(4):
        h.begin()
        h.end()
    assert depths_along(h.cache.tree, prompt) == [4 * chunk]
    second = h.add(prompt[: 4 * chunk] + text(2, 5), 3)
    h.begin()
    assert cached(second) == (4 * chunk, 4 * chunk)
    assert first.output == []
    h.drain()
    third = h.serve(prompt[: 4 * chunk] + text(3, 5), 3)
    assert cached(third) == (4 * chunk, 4 * chunk)
    h.close()


def test_a_rebuild_shares_kv_and_writes_none() -> None:
    h = Driver(make_config(states=64))
    shared = text(1, 200)
    h.serve(shared + text(2, 100), 2)
    before, in_use = len(h.runner.log), h.cache.tree.num_tokens
    h.serve(shared + text(3, 50), 1)
    prefill = h.runner.log[before]
    assert (prefill.starts.tolist(), prefill.write_from.tolist()) == ([0], [200])
    assert h.cache.tree.num_tokens == in_use + 50
    h.close()

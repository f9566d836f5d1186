"""C19: the same tokens for somebody else."""

from __future__ import annotations

import pytest

from hyradix.cache.node import new_hasher
from hyradix.request import MissReason, Namespace
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

NAMES = [("", ""), ("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a", "b\x00c")]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("at_once", [True, False])
def test_no_sharing_across_salts_and_adapters(at_once: bool, chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap, track_interval=0))
    n = 150
    prompt = text(1, n)
    for adapter, salt in NAMES:
        record = h.add(prompt, 3, adapter=adapter, salt=salt)
        if not at_once:
            h.run()
            assert record.state.miss_reason is MissReason.COLD
    h.drain()
    assert all(cached(r) == (0, 0) for r in h.records.values())
    assert len(h.cache.tree.roots()) == len(NAMES)
    assert h.cache.tree.num_tokens == len(NAMES) * (n + 2)
    for adapter, salt in NAMES:
        assert cached(h.serve(prompt, 3, adapter=adapter, salt=salt)) == (n - 1, n - 1)
        assert depths_along(h.cache.tree, prompt, Namespace(adapter, salt)) == [n - 1]
    h.close()


def test_digests_of_different_names_differ() -> None:
    digests = {new_hasher(Namespace(adapter, salt)).intdigest() for adapter, salt in NAMES}
    assert len(digests) == len(NAMES)


def test_an_empty_namespace_is_dropped() -> None:
    h = Driver(make_config(kv_slots=60, max_context=60))
    for i in range(10):
        h.serve(text(i, 40), 2, salt=str(i))
    assert len(h.cache.tree.roots()) <= 2
    h.close()

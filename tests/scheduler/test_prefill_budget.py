"""``max_prefill_tokens`` bounds the prompt tokens of a whole step; decodes go on beside them."""

from __future__ import annotations

import pytest

from tests.support.drive import Driver, text
from tests.support.harness import make_config


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 128])
def test_all_prefills_of_a_step_share_one_budget(chunk: int, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap))
    decoding = h.add(text(1, 10), 200)
    h.run(until=lambda: bool(decoding.output))
    holding = decoding.state.holding
    assert holding is not None
    row = holding.row
    before = len(h.runner.log)
    others = [h.add(text(2 + i, n), 1) for i, n in enumerate([2, 37, 9, 70, 1])]
    h.run(until=lambda: all(other.output for other in others))
    assert len(h.runner.log) > before
    for batch in h.runner.log[before:]:
        assert int(batch.num_tokens[batch.rows != row].sum()) <= chunk
        assert row in batch.rows, "a decode is never held up by prefills"
    if chunk == 128:
        assert len(h.runner.log) - before <= 3, "119 tokens fit into one step"
    h.close()

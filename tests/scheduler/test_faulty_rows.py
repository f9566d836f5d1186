"""A row whose logits are not finite ends alone, and leaves nothing of that step behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hyradix.request import FinishReason, StepOutput
from tests.support.drive import Driver, expect, reply, text
from tests.support.harness import Record, make_config
from tests.support.tree_view import depths_along


class Faulty(Driver):
    """Spoils the ``at``-th token of one request."""

    victim: Record | None = None
    at = 1

    def commit(self) -> None:
        runner, victim = self.runner, self.victim
        collect = runner.collect

        def spoiled() -> StepOutput:
            output = collect()
            if victim is None or victim.state.holding is None:
                return output
            is_due = victim.state.num_output_tokens == self.at - 1
            rows = (output.rows == victim.state.holding.row) & is_due
            return dataclasses.replace(
                output,
                is_faulty=rows,
                token_ids=np.where(rows[:, None], 2**30, output.token_ids).astype(np.int32),
            )

        runner.collect = spoiled  # type: ignore[method-assign]
        super().commit()
        del runner.collect  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("chunk", [0, 16])
def test_only_the_faulty_request_ends(chunk: int, at: int, overlap: bool) -> None:
    h = Faulty(make_config(max_prefill_tokens=chunk, overlap=overlap, track_interval=2))
    shared = text(1, 40)
    bad = h.add(shared + text(2, 10), 9)
    good = h.add(shared + text(3, 10), 9)
    h.victim, h.at = bad, at
    h.drain()
    assert bad.reason is FinishReason.ERROR
    assert bad.output == reply(bad.prompt, at - 1)
    expect(h, good)
    left = depths_along(h.cache.tree, bad.prompt + reply(bad.prompt, at + 1))
    assert max(left, default=0) < 49 + at, "a state that the faulty step wrote"
    if at == 1:
        assert 49 not in left
    h.victim = None
    h.records.pop(bad.state.request_id)
    h.serve(bad.prompt, 9)
    h.close()

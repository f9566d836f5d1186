"""Prompt logprobs at their smallest: a prompt of one token has exactly one entry, None."""

from __future__ import annotations

import pytest

from hyradix.request import Request, SamplingParams
from tests.support.demo import DemoEngines


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3])
def test_one_entry_per_prompt_token(length: int) -> None:
    engine = DemoEngines().make(kv_slots=9000, states=40)
    engine.add(
        Request(
            request_id="r",
            prompt_token_ids=(300).to_bytes(4, "little") * length,
            sampling=SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1),
            seed=0,
        )
    )
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    given = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(given) == 1, "told once"
    assert len(given[0]) == length
    assert given[0][0] is None
    assert all(entry is not None for entry in given[0][1:])

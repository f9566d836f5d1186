"""Drafts through the real engine: what one request leaves in the cache, and another drafts from."""

from __future__ import annotations

import numpy as np
import pytest

from hyradix.engine.engine import Engine
from hyradix.request import Request, SamplingParams
from hyradix.runner import warm_up
from hyradix.runner.runner import ModelRunner
from tests.support.demo import DemoEngines


def serve(engine: Engine, prompt: list[int], *, is_followed: bool = True) -> tuple[list[int], int]:
    """A greedy reply of 24 tokens, and how many were cached."""
    tokens: list[int] = []
    cached = 0
    request = Request(
        request_id=f"{len(prompt)}",
        prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
        sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        seed=0,
    )
    assert engine.add(request) is None
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
            cached = output.num_cached_tokens
        for state in engine.scheduler._running:
            state.is_followed &= is_followed or state.is_prefilling
    return tokens, cached


@pytest.mark.parametrize("mode", ["snapshot", "log"])
def test_a_reply_without_drafts_can_be_drafted_from(mode: str) -> None:
    """The draft layer computed no KV for it: what its slots held before must not be read."""
    engine = DemoEngines().make(
        spec="mtp", spec_steps=3, spec_state=mode, max_requests=1, kv_slots=512, num_threads=1
    )
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.poison_kv(list(range(513)))
    prompt = engine._tokenizer.encode("Tell me something about animals.").tolist()
    reply, _ = serve(engine, prompt, is_followed=False)
    assert engine.stats().num_draft_rounds == 0
    _, cached = serve(engine, prompt + reply + prompt)
    assert cached >= len(prompt) + len(reply) - 1
    assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_trees_that_seem_to_take_no_time(monkeypatch: pytest.MonkeyPatch, proposer: str) -> None:
    """On a busy machine larger trees may be timed as fast as small ones, or faster."""
    monkeypatch.setattr(warm_up, "_seconds", lambda work, device: 1e-3)
    engine = DemoEngines().make(spec=proposer, max_requests=2, kv_slots=512, num_threads=1)
    prompt = engine._tokenizer.encode("one two three one two three one two").tolist()
    assert len(serve(engine, prompt)[0]) == 24

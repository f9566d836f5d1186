"""Tokens whose hidden states nobody asks for stop behind the last mixer: all families.

The twin asks for all (as tests that keep logits do); tokens, states and KV are to be the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hyradix.models.loader import load_model
from hyradix.request import SamplingParams, StateSave
from tests.support.player import Player

VOCAB = 97


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def played(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Player, list[int]]:
    """Chunks, a step without a row that samples, decodes beside a chunk, saves; what came out of
    the model in each step."""
    player, counts = Player(model, **options), []
    forward = type(model).forward

    def counted(self: Any, *given: Any) -> Any:
        hidden = forward(self, *given)
        counts.append(len(hidden))
        assert hidden.shape[1] == model.config.hidden_size
        return hidden

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", counted)
        first, second = player.add(tokens(23, 1)), player.add(tokens(9, 2))
        saved = player.new_state()
        player.step({first: 10}, saves=(StateSave(first, saved, 7),))
        player.step({first: 13, second: 9})
        player.step({first: 1, second: 1})
        third = player.add(tokens(17, 3), source=saved, done=7)
        player.share_kv(third, first, 7)
        player.step({first: 1, third: 5, second: 1})
        player.step({first: 1, third: 5, second: 1})
    return player, counts


def memory(player: Player) -> list[torch.Tensor]:
    kv, used = player.runner.pools.kv, player._used + 1
    pools = [x[:, 1:used] for x in (kv.k, kv.v)]
    return pools + [x[:, 1 : player._next_state] for x in player.runner.pools.states.tensors]


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_nothing_depends_on_what_nobody_asks_for(reference, backend, monkeypatch) -> None:
    model = load_model(reference[1], backend=backend)
    ours, counts = played(model, monkeypatch, keep_logits=False)
    whole, all_counts = played(model, monkeypatch, keep_logits=True)
    assert counts == [0, 2, 2, 2, 3]
    assert all_counts == [10, 22, 2, 7, 7]
    assert [row.tokens for row in ours.rows.values()] == [r.tokens for r in whole.rows.values()]
    for a, b in zip(memory(ours), memory(whole), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_whoever_asks_for_the_prompts_logprobs_gets_all(reference, monkeypatch) -> None:
    model = load_model(reference[1])
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    _, counts = played(model, monkeypatch, keep_logits=False, sampling=sampling)
    assert counts == [10, 22, 2, 7, 7]

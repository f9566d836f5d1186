"""Logits against transformers: whole prefill, uneven chunks, decode, mixed batches.

Always against its forward over the whole sequence, without a cache. With one it disagrees with
itself: Mamba2's decode step leaves the limits of time steps out, and bamba counts positions from 0
in every call.
"""

from __future__ import annotations

import pytest
import torch

from hyradix.models.loader import load_model
from hyradix.request import StateSave
from tests.support.player import Player

TOLERANCE = 1e-4
BACKENDS = ["compiled", "torch"]


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def expected(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def difference(player: Player, row: int, model) -> float:
    ours = player.logits_of(row)
    return float((ours - expected(model, player.rows[row].tokens[: len(ours)])).abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_prefill_then_decode(reference, backend):
    model, directory = reference
    player = Player(load_model(directory, backend=backend))
    row = player.add(prompt(70, 1))
    player.step({row: 70})
    for _ in range(64):
        player.step({row: 1})
    assert difference(player, row, model) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_chunks_in_mixed_batches(reference, backend):
    model, directory = reference
    player = Player(load_model(directory, backend=backend), scatter=True)
    player.runner.poison_states(list(range(16)))
    player.runner.poison_kv(list(range(1024)))
    a, b, c = (player.add(prompt(n, n)) for n in (65, 1, 130))
    player.step({a: 1, b: 1, c: 64})
    player.step({a: 2, b: 1, c: 9})
    player.step({b: 1, c: 57, a: 40})
    player.step({a: 22, b: 1})
    for _ in range(20):
        player.step({a: 1, c: 1, b: 1} if player.rows[c].done < 140 else {b: 1, a: 1})
    for row in (a, b, c):
        assert difference(player, row, model) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_going_on_from_a_state_saved_inside_a_prefill(reference, backend):
    model, directory = reference
    player = Player(load_model(directory, backend=backend), scatter=True)
    player.runner.poison_states(list(range(16)))
    player.runner.poison_kv(list(range(1024)))
    tokens, slot = prompt(90, 5), player.new_state()
    first = player.add(tokens)
    player.step({first: 90}, saves=(StateSave(first, slot, 41),))
    second = player.add(tokens[:60] + prompt(30, 6), source=slot, done=41)
    player.share_kv(second, first, 41)
    player.step({second: 49})
    ours = player.logits_of(second)
    theirs = expected(model, player.rows[second].tokens[:90])[41:]
    assert float((ours - theirs).abs().max()) < TOLERANCE

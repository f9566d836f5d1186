"""Rows of a step attend by parts: those that prefill, and those that decode, as they do alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hyradix.device_bytes import LEAST_PARTS
from hyradix.kernels import triton_attention, triton_table
from hyradix.kernels.attention import triton_gather
from hyradix.kernels.device_forms import DeviceTokens
from hyradix.runner import device_launch
from hyradix.runner.device_runner import DeviceRunner
from tests.kernels.triton_kernels.cases import error
from tests.runner.device.served import World, tokens
from tests.support.player import GreedySampler, Player

LONG, SHORT, NEW = 65, 3, 5
DECODES = {0: (1, 1), 1: (1, 1)}
"""Rows 0 and 1, each one node."""


@dataclass
class Step:
    """What the model was given and made of it, and the tokens by row."""

    tokens: DeviceTokens
    hidden: torch.Tensor
    sampled: dict[int, int]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("model"))


def last_step(
    world: World, device: torch.device, work: dict[int, int], *, has_graphs: bool = True
) -> Step:
    """``work`` behind the prefill of two rows; row 2 is new."""
    model = world.model("triton", str(device))
    player = Player(model, keep_logits=False, scatter=True, decode_log=4, max_context=128)
    runner: Any = DeviceRunner(model, player.config, GreedySampler(), has_graphs=has_graphs)
    player.runner = runner
    player.add(tokens(LONG, 1))
    player.add(tokens(SHORT, 2))
    player.step({0: LONG, 1: SHORT})
    player.add(tokens(NEW, 3))
    forward, seen = runner.launcher._forward, []
    run = forward._run

    def watched(ids: torch.Tensor, given: DeviceTokens, *rest: Any) -> torch.Tensor:
        hidden, wanted = run(ids, given, *rest[:-1], None), rest[-1]
        seen.append((given, hidden))
        return hidden if wanted is None else hidden[wanted.index]

    forward._run = watched
    trees = {row: limits for row, limits in DECODES.items() if row in work}
    out = player.step(work, trees=trees)
    assert model.ops._scratch.num_bytes == runner.launcher.scratch_bytes
    (found,) = seen
    return Step(*found, dict(zip(out.rows.tolist(), out.token_ids[:, 0].tolist(), strict=True)))


@pytest.mark.slow
def test_decodes_beside_a_chunk_are_decodes_alone(world, device, monkeypatch) -> None:
    monkeypatch.setitem(triton_table._MULTIPROCESSORS, "cpu", 4)
    decodes, chunk = {0: 1, 1: 1}, {2: NEW}
    alone = last_step(world, device, decodes)
    prefill = last_step(world, device, chunk, has_graphs=False)
    mixed = last_step(world, device, {**decodes, **chunk}, has_graphs=False)

    whole, (first, second) = alone.tokens.parts[0], mixed.tokens.parts
    assert (first.tokens, second.tokens) == (slice(0, NEW), slice(NEW, NEW + 2))
    assert first.config == prefill.tokens.parts[0].config
    assert second.config == whole.config
    assert second.config.splits > 1
    assert second.config.block_n <= LONG, "all keys are in one split"
    assert error(mixed.hidden[NEW:], alone.hidden) < 1e-5
    assert error(mixed.hidden[:NEW], prefill.hidden) < 1e-5
    assert mixed.sampled == alone.sampled | prefill.sampled

    unpadded = last_step(world, device, decodes, has_graphs=False)
    assert unpadded.tokens.parts[0].config == whole.config
    assert torch.equal(unpadded.hidden, alone.hidden)


@pytest.mark.slow
@pytest.mark.parametrize("decode_log", [0, 4])
def test_nothing_depends_on_tokens_that_nobody_asks_for(
    world, device, decode_log, monkeypatch
) -> None:
    """Chunks that sample nothing, decodes beside one; then with the hidden states of all tokens."""
    found = []
    for wants_all in (False, True):
        if wants_all:
            monkeypatch.setattr(device_launch, "wants_prompt_logprobs", lambda *_: True)
        model = world.model("triton", str(device))
        player = Player(model, keep_logits=False, decode_log=decode_log)
        player.runner = DeviceRunner(model, player.config, GreedySampler())
        for seed, count in enumerate((LONG, SHORT, NEW)):
            player.add(tokens(count, seed))
        player.step({0: 30})
        player.step({0: LONG - 30, 1: SHORT})
        for _ in range(3):
            player.step({0: 1, 1: 1, 2: 1}, trees=DECODES)
        pools = player.runner.pools
        memory = [pools.kv.k[:, 1 : player._used + 1], pools.kv.v[:, 1 : player._used + 1]]
        memory += [x[:, 1 : player._next_state] for x in pools.states.tensors]
        found.append(([row.tokens for row in player.rows.values()], [x.clone() for x in memory]))
    (ours, memory), (whole, of_all) = found
    assert ours == whole
    assert all(error(a, b) < 1e-5 for a, b in zip(memory, of_all, strict=True))


@pytest.mark.slow
def test_a_chunk_whose_keys_were_copied_is_the_same(world, device, monkeypatch) -> None:
    work = {0: 1, 1: 1, 2: NEW}
    by_slots = last_step(world, device, work, has_graphs=False)
    monkeypatch.setattr(triton_gather, "LEAST_READS", 0)
    copied = last_step(world, device, work, has_graphs=False)

    assert [part.keys is None for part in by_slots.tokens.parts] == [True, True]
    assert [part.keys is None for part in copied.tokens.parts] == [False, True]
    assert error(copied.hidden, by_slots.hidden) < 1e-5
    assert copied.sampled == by_slots.sampled


@pytest.mark.parametrize("dim", [64, 256, 576])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_scratch_holds_the_splits_of_any_number_of_decodes(dim: int, kv_heads: int) -> None:
    assert triton_attention.LEAST_PARTS == LEAST_PARTS
    most = 0
    for rows in range(1, 1025):
        config = triton_table.attend_config(
            torch.device("meta"), rows=4, programs=rows * kv_heads, dim=dim, itemsize=2
        )
        most = max(most, rows * config.splits)
    assert most <= LEAST_PARTS

"""The runner: pools' bytes, state ops, saves, shared KV, sampling, faults, prompt logprobs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hyradix.models.loader import load_model
from hyradix.request import SamplingParams, ScheduledBatch, StateOp, StateOpKind, StateSave
from tests.support.player import Player

CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return load_model(directory, load_format="dummy", backend=request.param)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, count).tolist()


def poisoned(model, **options) -> Player:
    player = Player(model, **options)
    player.runner.poison_states(list(range(player.config.num_states + 1)))
    player.runner.poison_kv(list(range(player.config.num_kv_slots + 1)))
    return player


def states_of(player: Player, slot: int) -> list[torch.Tensor]:
    return [tensor[:, slot].clone() for tensor in player.runner.pools.states.tensors]


def test_pools_hold_exactly_the_bytes_that_were_planned(model):
    player = Player(model)
    pools = player.runner.pools
    assert pools.kv.num_bytes == player.config.kv_pool_bytes
    assert pools.states.num_bytes == player.config.state_pool_bytes
    assert len(pools.states.tensors) == 2


def test_saves_resume_exactly(model):
    player = poisoned(model)
    prompt = tokens(40)
    first = player.add(prompt)
    slots = {depth: player.new_state() for depth in (1, 17, 39, 40)}
    saves = [StateSave(first, slot, depth) for depth, slot in reversed(slots.items())]
    player.step({first: 40}, saves=tuple(saves))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            states_of(player, slots[40]), states_of(player, player.rows[first].state), strict=True
        )
    )
    second = player.add(prompt, source=slots[17], done=17)
    player.share_kv(second, first, 17)
    player.step({second: 23})
    ours, whole = player.logits_of(second), player.logits_of(first)[17:40]
    assert torch.allclose(ours, whole, atol=1e-5)
    assert player.rows[first].tokens == player.rows[second].tokens


def test_a_save_that_a_row_without_drafts_does_not_reach_is_not_written(model):
    """Mode snapshot decodes such a row in place: one token, while the save allows for drafts."""
    player = poisoned(model, spec="ngram", spec_state="snapshot", spec_steps=4)
    row, other = player.add(list(range(20))), player.add(list(range(30, 50)))
    player.step({row: 20, other: 20})
    near, far = player.new_state(), player.new_state()
    saves = (StateSave(row, near, 21), StateSave(row, far, 24))
    out = player.step({row: 1, other: 1}, saves=saves, trees={row: (5, 5), other: (5, 5)})
    assert out.num_nodes.tolist() == [1, 1]
    assert all(tensor.isnan().all() for tensor in states_of(player, far))
    pairs = zip(states_of(player, near), states_of(player, player.rows[row].state), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_rebuild_reads_shared_kv_and_does_not_write_it(model):
    player = poisoned(model)
    prompt = tokens(30)
    first = player.add(prompt)
    slot = player.new_state()
    player.step({first: 30}, saves=(StateSave(first, slot, 10),))
    before = player.runner.pools.kv.k.clone()
    second = player.add(prompt, source=slot, done=10)
    player.share_kv(second, first, 25)  # the state is at 10, KV reaches to 25
    player.step({second: 20}, write_from={second: 25})
    shared = player.runner.table.kv_slots[first, :30]
    after = player.runner.pools.kv.k
    assert torch.equal(after[:, shared].nan_to_num(), before[:, shared].nan_to_num())
    assert torch.allclose(player.logits_of(second), player.logits_of(first)[10:30], atol=1e-5)


def test_a_step_of_state_ops_alone_and_one_that_samples_nothing(model):
    player = poisoned(model)
    row = player.add(tokens(9))
    out = player.step({row: 4}, sample=False)
    assert len(out.rows) == 0
    none = np.zeros(0, np.int32)
    op = StateOp(StateOpKind.COPY, 9, player.rows[row].state)
    no_flags = none.astype(np.bool_)
    batch = ScheduledBatch(
        7, none, none, none, none, none, no_flags, none, none, none, none, no_flags, state_ops=(op,)
    )
    player.runner.submit(batch)
    out = player.runner.collect()
    assert out.step == 7
    assert out.token_ids.shape == (0, 1)
    pairs = zip(states_of(player, 9), states_of(player, player.rows[row].state), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_sampled_tokens_land_where_they_are_consumed(model):
    player = poisoned(model)
    row = player.add(tokens(5))
    out = player.step({row: 5})
    assert player.runner.table.token_ids[row, 5] == out.token_ids[0, 0]
    assert out.num_tokens.tolist() == [1]


def test_the_last_token_of_a_full_row_is_returned_and_dropped(model):
    player = Player(model, max_context=8)
    row = player.add(tokens(8))
    assert len(player.step({row: 8}).rows) == 1


def test_a_faulty_row_harms_no_other(model):
    player, alone = poisoned(model), poisoned(model)
    a, b = player.add(tokens(6)), player.add(tokens(7, 1))
    player.step({a: 6, b: 7})
    player.runner.poison_states([player.rows[a].state])
    out = player.step({a: 1, b: 1})
    assert out.is_faulty.tolist() == [True, False]
    c = alone.add(tokens(7, 1))
    alone.step({c: 7})
    assert alone.step({c: 1}).token_ids[0, 0] == out.token_ids[1, 0]


def test_sampler_is_told_all_known_tokens(model):
    player = Player(model)
    row = player.add(tokens(12))
    player.step({row: 5})
    assert player.runner._sampler.known[row].tolist() == tokens(12)


def test_prompt_logprobs_over_chunks(model, monkeypatch):
    monkeypatch.setattr("hyradix.runner.prompt_logprobs.MAX_LOGITS", 61 * 3)
    player = Player(model, sampling=SamplingParams(prompt_logprobs=2))
    prompt = tokens(20)
    row = player.add(prompt)
    outs = [player.step({row: n}) for n in (7, 1, 12)]
    parts = [out.prompt_logprobs[0] for out in outs]
    assert [p.start for p in parts] == [1, 8, 9]
    found = np.concatenate([p.logprobs.logprobs for p in parts])
    expected = player.logits_of(row).log_softmax(1)[range(19), prompt[1:]]
    assert np.allclose(found, expected.numpy(), atol=1e-5)
    assert parts[2].logprobs.top_ids.shape == (11, 2)
    assert len(player.step({row: 1}).prompt_logprobs) == 0


def test_warm_up_touches_no_live_memory(model):
    player = Player(model, keep_logits=False)
    row = player.add(tokens(9))
    player.step({row: 9})
    pools = player.runner.pools
    before = [t[:, 1:].clone() for t in (*pools.states.tensors, pools.kv.k, pools.kv.v)]
    player.runner.warm_up()
    after = [t[:, 1:] for t in (*pools.states.tensors, pools.kv.k, pools.kv.v)]
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )

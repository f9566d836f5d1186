"""The synchronous runner and whole engines by the Triton backend say what torch's say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.request import Request, SamplingParams, StateSave
from tests.support.player import Player
from tests.support.triton_models import VOCAB, TinyEngines, load

BFLOAT16 = "bfloat16"
LIMIT = {"float32": 2e-5, BFLOAT16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(LIMIT))


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def poisoned(model, **options) -> Player:
    player = Player(model, max_requests=3, kv_slots=64, states=10, **options)
    player.runner.poison_states(list(range(player.config.num_states + 1)))
    player.runner.poison_kv(list(range(player.config.num_kv_slots + 1)))
    return player


def play(model, decode_log: int) -> Player:
    """Chunks beside decodes, saves of both, a row that resumes from a save."""
    player = poisoned(model, decode_log=decode_log)
    a, b = player.add(tokens(9)), player.add(tokens(5, 1))
    early, late = player.new_state(), player.new_state()

    def step(**work: int) -> None:
        counts = {{"a": a, "b": b, "c": 2}[name]: count for name, count in work.items()}
        alone = {row: (1, 1) for row, count in counts.items() if count == 1}
        player.step(counts, saves=saves.pop(player.steps, ()), trees=alone if decode_log else None)

    saves = {0: (StateSave(a, early, 4),), 2: (StateSave(a, late, 10),)}
    step(a=7)
    step(a=2, b=5)
    step(a=1, b=1)
    c = player.add(tokens(9), source=early, done=4)
    player.share_kv(c, a, 4)
    step(a=1, c=5, b=1)
    step(b=1, a=1, c=1)
    return player


@dtypes
@pytest.mark.parametrize("decode_log", [0, 4])
def test_the_runner_s_logits_and_states_are_torch_s(tmp_path, device, dtype, decode_log):
    twin = play(load(tmp_path, "torch", dtype=dtype), decode_log)
    ours = play(load(tmp_path, "triton", str(device), dtype), decode_log)
    for row, expected in twin.rows.items():
        assert ours.rows[row].tokens == expected.tokens
        difference = (ours.logits_of(row).cpu() - twin.logits_of(row)).abs().max()
        assert float(difference) < LIMIT[dtype]
    pools = ours.runner.pools.states
    assert pools.recurrent.dtype == torch.float32
    assert pools.conv.dtype == ours.runner.pools.kv.k.dtype == getattr(torch, dtype)
    for own, expected in zip(pools.tensors, twin.runner.pools.states.tensors, strict=True):
        own, expected = own.cpu().float(), expected.float()
        assert torch.equal(own.isnan(), expected.isnan())
        assert torch.allclose(own, expected, atol=LIMIT[dtype], equal_nan=True)


WAYS = {
    "in place": {"decode_log": 0},
    "log": {"decode_log": 16},
    "chains": {"spec": "ngram", "spec_state": "log", "spec_steps": 2},
}


def serve(engines: TinyEngines, **options: object) -> tuple[list[list[int]], list[int], int]:
    """Two requests at a time, the later ones on the prefixes of the earlier: ids, cached tokens,
    and how many tokens were drafted."""
    engine = engines.make(
        kv_slots=96, states=8, max_requests=2, max_prefill_tokens=7, min_gain=0, **options
    )
    prompts = [tokens(12), tokens(9, 1), tokens(12) + tokens(3, 2), tokens(9, 1)]
    said: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    for first in (0, 2):
        for i in (first, first + 1):
            sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            ids = np.array(prompts[i], "<i4").tobytes()
            engine.add(Request(request_id=str(i), prompt_token_ids=ids, sampling=sampling, seed=0))
        while engine.has_work():
            for out in engine.step():
                said[int(out.request_id)] += out.token_ids
                cached[int(out.request_id)] = out.num_cached_tokens
    return said, cached, engine.stats().num_draft_tokens


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_says_what_torch_s_says(tmp_path, device, way):
    """Prefill in chunks, hits, saves, two requests at a time, whatever holds their states."""
    twin = serve(TinyEngines(tmp_path, "torch", "cpu", "float32"), **WAYS[way])
    ours = serve(TinyEngines(tmp_path, "triton", str(device), "float32"), **WAYS[way])
    assert ours == twin
    _, cached, num_drafted = ours
    assert [count > 0 for count in cached] == [False, False, True, True]
    assert (num_drafted > 0) == (way == "chains")

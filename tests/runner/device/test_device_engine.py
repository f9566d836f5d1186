"""The data plane on a device under the real engine, against the synchronous one in torch."""

from __future__ import annotations

import pytest
import torch

from hyradix.runner.device_runner import DeviceRunner
from tests.runner.device.served import (
    Arrival,
    Poisoner,
    Replies,
    World,
    arrival,
    compare,
    poison_all,
    serve,
    tokens,
)

pytestmark = pytest.mark.slow

DOCUMENT = tokens(40, 0)
TRAFFIC = (
    arrival(0, DOCUMENT[:21], marks=[17]),
    arrival(0, tokens(5, 1), max_tokens=13),
    arrival(1, tokens(9, 2), temperature=0.8),
    arrival(3, DOCUMENT[:17] + tokens(6, 3), temperature=1.3, top_k=9, top_p=0.9),
    arrival(4, tokens(19, 4), temperature=1.0, top_p=0.7, min_p=0.02, max_tokens=7),
    arrival(6, DOCUMENT[:19] + tokens(2, 5), max_tokens=7),
    arrival(8, tokens(7, 6), repetition_penalty=1.4, logprobs=2, max_tokens=5),
    arrival(9, tokens(20, 7), prompt_logprobs=1, min_tokens=3, max_tokens=5),
    arrival(10, tokens(4, 8), abort_at=17, max_tokens=30),
    arrival(11, DOCUMENT[:30], logit_bias={3: 4.0}, temperature=0.7, max_tokens=4),
    arrival(12, tokens(3, 9), max_tokens=9, temperature=0.9, top_k=4),
)
"""Every way to sample, prompts in chunks beside decodes, prefixes that others have."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(world: World) -> Replies:
    return serve(world.twin(prefix_cache=False), TRAFFIC)


def served(world: World, device: torch.device, traffic: tuple[Arrival, ...], **options) -> Replies:
    engine = world.engine(world.model("triton", str(device)), DeviceRunner, **options)
    runner = engine.runner
    poison_all(runner, engine.scheduler.config)
    Poisoner(engine.scheduler.cache, runner)
    replies = serve(engine, traffic)
    stats = engine.stats()
    assert stats.kv.held == stats.state.held == 0
    assert stats.num_preemptions or not options.get("force_preempt_every")
    return replies


@pytest.mark.parametrize(
    "options",
    [
        {"decode_log": 4, "overlap": True, "max_requests": 5},
        {"decode_log": 3, "overlap": False, "force_preempt_every": 9},
        {"decode_log": 0, "overlap": True, "force_preempt_every": 7},
        {"decode_log": 16, "overlap": True, "prefix_cache": False, "max_prefill_tokens": 7},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_replies_are_the_synchronous_ones(world, expected, device, options) -> None:
    """With five rows, steps of three are padded. Every slot that nobody owns holds NaN."""
    compare(served(world, device, TRAFFIC, **options), expected)

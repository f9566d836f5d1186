"""Computed bytes are allocated bytes, on a device too."""

from __future__ import annotations

import pytest

from hyradix.device_bytes import EXPERT_TOKENS, PRODUCT_PARTS, StepSize, scratch_bytes, table_bytes
from hyradix.kernels import triton_dense
from hyradix.models.loader import model_facts
from hyradix.runner.device_runner import DeviceRunner
from hyradix.sampling.sampler import Sampler
from tests.runner.device.served import World


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> DeviceRunner:
    world = World(tmp_path_factory.mktemp("model"))
    model = world.model("triton")
    config = world.config(model, decode_log=5, max_context=80)
    return DeviceRunner(model, config, Sampler(config.max_requests, config.vocab_size, ()))


def test_pools_logs_tables_and_scratch_are_what_was_planned(runner: DeviceRunner) -> None:
    config, launcher = runner.config, runner.launcher
    assert runner.pools.kv.num_bytes == config.kv_pool_bytes
    assert runner.pools.states.num_bytes == config.state_pool_bytes
    assert launcher.log is not None
    assert launcher.log.buffers.num_bytes == config.draft_bytes
    facts = model_facts(launcher._model.config)
    assert facts.forward is not None
    assert facts.recurrent is not None
    step = StepSize(
        max_requests=config.max_requests,
        max_tokens=config.max_prefill_tokens + config.max_requests,
        max_context=config.max_context,
        table_width=config.table_width,
    )
    logits = launcher._forward.logits.nbytes + launcher._prefill.logits.nbytes
    assert launcher.tables.num_bytes + logits == table_bytes(facts.forward, step)
    assert launcher.scratch_bytes == scratch_bytes(facts.forward, facts.recurrent, step, 4)


def test_experts_work_on_so_many_tokens_at_a_time() -> None:
    assert triton_dense.MAX_EXPERT_TOKENS == EXPERT_TOKENS
    assert triton_dense.NUM_PARTS == PRODUCT_PARTS

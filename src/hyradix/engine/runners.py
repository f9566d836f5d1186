"""The data plane of an engine: which runner, on pools of which size, ready for its first step.

Owns: the choice of the runner, what is measured of a GPU once the model is loaded.
Does not know: settings, files, requests.
Read next: ``runner/runner.py``, ``runner/device_runner.py``.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hyradix.config import MIB, DeviceFacts, EngineConfig
from hyradix.device_bytes import CONTEXT_BYTES
from hyradix.engine.device import device_facts
from hyradix.errors import ConfigError
from hyradix.models.decoder import Decoder
from hyradix.request import Runner
from hyradix.runner.background import BackgroundRunner
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.spec_config import RoundCosts

Progress = Callable[[str, int, int], None]


def start_runner(
    model: Decoder, config: EngineConfig, on_progress: Progress
) -> tuple[Runner, RoundCosts | None]:
    """A runner that is warmed up, and what rounds of drafts cost where that is wanted.

    Raises ``ConfigError`` where memory is short.
    """
    if is_asynchronous(model, config):
        device_runner = _allocated(config, lambda: make_device_runner(model, config))
        device_runner.warm_up(on_progress)
        return device_runner, None
    runner = _allocated(config, lambda: ModelRunner(model, config, _sampler(config)))
    on_progress("kernels", 0, 1)
    runner.warm_up()
    on_progress("kernels", 1, 1)
    is_automatic = config.spec is not None and config.spec.is_automatic
    costs = runner.measure_costs() if is_automatic else None
    return BackgroundRunner(runner.execute) if config.overlap else runner, costs


def is_asynchronous(model: Decoder, config: EngineConfig) -> bool:
    """Whether steps are launched, and waited for later: by kernels of a device, without drafts."""
    return model.ops.takes_device_forms and config.spec is None


def make_device_runner(model: Decoder, config: EngineConfig) -> Any:
    """A ``DeviceRunner``. Its module needs Triton, which is optional: it is loaded here alone."""
    module = importlib.import_module("hyradix.runner.device_runner")
    return module.DeviceRunner(model, config, _sampler(config))


def measure(
    model: Decoder, config: EngineConfig, memory_fraction: float, on_progress: Progress
) -> DeviceFacts:
    """What a GPU has left for pools now that weights and scratch are on it.

    The largest step is run, on pools of one slot; kernels are compiled before.
    """
    device = torch.device(config.device)
    peak: int = 0
    if is_asynchronous(model, config):
        on_progress("kernels", 0, 1)
        tiny = replace(config, num_kv_slots=1, num_states=1)
        peak = _allocated(config, lambda: _peak(make_device_runner(model, tiny), on_progress))
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    facts = device_facts("cuda", memory_fraction=memory_fraction)
    return replace(facts, peak_bytes=peak) if peak else _unmeasured(facts, model)


def _peak(runner: Any, on_progress: Progress) -> int:
    runner.compile_ahead(on_progress)
    peak: int = runner.measure_peak()
    return peak


def _unmeasured(facts: DeviceFacts, model: Decoder) -> DeviceFacts:
    """The synchronous runner: what is loaded already is not to be counted twice."""
    return replace(facts, free_bytes=facts.free_bytes + model.weight_bytes + CONTEXT_BYTES)


def _allocated(config: EngineConfig, make: Callable[[], Any]) -> Any:
    """What ``make`` returns. Raises ``ConfigError`` where memory is short."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if "alloc" not in str(error):  # torch has no class of its own for it on the CPU
            raise
        pools = config.kv_pool_bytes + config.state_pool_bytes
        param, lower = "kv_slots", "--kv-slots, --states or --max-requests"
        buffers = ""
        if config.draft_bytes:
            buffers = f" ({config.draft_bytes / MIB:.0f} MiB of it for drafts and logs)"
        if config.draft_bytes > pools:
            param, lower = "max_requests", "--max-requests, --decode-log or --spec-nodes"
        raise ConfigError(
            f"{config.num_kv_slots} KV slots, {config.num_states} states and {config.max_requests} "
            f"requests need {(pools + config.draft_bytes) / MIB:.0f} MiB{buffers}, which cannot be "
            f"allocated; lower {lower}",
            param=param,
        ) from error


def _sampler(config: EngineConfig) -> Sampler:
    return Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)

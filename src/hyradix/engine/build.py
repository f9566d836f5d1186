"""From settings to a running engine: the one place where every part is put together.

Owns: the order of start-up (find, resolve, load, warm up). Does not know: processes, HTTP.
Read next: ``engine.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hyradix.config import MIB, EngineConfig, ModelFacts, Settings, check_settings, resolve
from hyradix.engine.device import device_facts
from hyradix.engine.engine import Engine
from hyradix.engine.messages import EngineInfo
from hyradix.engine.model_source import ModelSource, find_source
from hyradix.engine.warmup import read_prompts, run_warmup
from hyradix.errors import ConfigError
from hyradix.models.decoder import Decoder
from hyradix.models.head_names import random_heads
from hyradix.models.loader import load_config, load_model, model_facts
from hyradix.runner.background import BackgroundRunner
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.text.tokenizer import Tokenizer

logger = logging.getLogger("hyradix.engine")

Progress = Callable[[str, int, int], None]


def build_engine(settings: Settings, on_progress: Progress) -> Engine:
    """Load everything; returns when the first request could run. Raises ``HyradixError``."""
    started = time.monotonic()
    check_settings(settings)
    prompts = read_prompts(settings)
    source = find_source(settings, on_progress)
    if source.note:
        logger.warning("%s", source.note)
    device = device_facts("cpu" if settings.device == "auto" else settings.device)
    tokenizer = Tokenizer.from_dir(source.text)
    facts = _facts(settings, source, tokenizer)
    config = resolve(settings, facts, device)
    model = load_model(
        source.model,
        dtype=config.dtype,
        load_format="dummy" if source.is_random else "auto",
        device=config.device,
        proposer=config.spec.proposer if config.spec is not None else None,
        max_context=config.max_context,
        on_progress=on_progress,
    )
    runner = _make_runner(model, config)
    on_progress("kernels", 0, 1)
    runner.warm_up()
    on_progress("kernels", 1, 1)
    is_automatic = config.spec is not None and config.spec.is_automatic
    costs = runner.measure_costs() if is_automatic else None
    info = _info(config, facts, source.text, time.monotonic() - started)
    steps = BackgroundRunner(runner.execute) if config.overlap else runner
    engine = Engine(config, steps, tokenizer, info, costs=costs)
    if prompts:
        run_warmup(engine, prompts, settings, source.text, tokenizer, on_progress)
    return engine


def _make_runner(model: Decoder, config: EngineConfig) -> ModelRunner:
    """Pools and buffers on top of a loaded model. Raises ``ConfigError`` where memory is short."""
    sampler = Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)
    try:
        return ModelRunner(model, config, sampler)
    except (MemoryError, RuntimeError) as error:
        if "alloc" not in str(error):  # torch has no class of its own for it on the CPU
            raise
        needed = config.kv_pool_bytes + config.state_pool_bytes + config.draft_bytes
        raise ConfigError(
            f"{config.num_kv_slots} KV slots, {config.num_states} states and {config.max_requests} "
            f"requests need {needed / MIB:.0f} MiB, which cannot be allocated; lower --kv-slots, "
            "--states or --max-requests",
            param="kv_slots",
        ) from error


def _facts(settings: Settings, source: ModelSource, tokenizer: Tokenizer) -> ModelFacts:
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    heads = random_heads(load_config(source.model)) if source.is_random else None
    facts = model_facts(source.model, dtype, name=source.name, heads=heads)
    if facts.eos_token_ids:
        return facts
    return replace(facts, eos_token_ids=tuple(tokenizer.eos_token_ids))


def _info(config: EngineConfig, facts: ModelFacts, directory: Path, load_s: float) -> EngineInfo:
    return EngineInfo(
        model_name=config.model_name,
        architecture=facts.architecture,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        max_requests=config.max_requests,
        num_kv_slots=config.num_kv_slots,
        num_states=config.num_states,
        kv_pool_bytes=config.kv_pool_bytes,
        state_pool_bytes=config.state_pool_bytes,
        weight_bytes=facts.weight_bytes,
        dtype=config.dtype,
        device=config.device,
        load_s=load_s,
        drafts=_drafts(config),
        draft_bytes=config.draft_bytes,
        model_dir=str(directory),
    )


def _drafts(config: EngineConfig) -> str:
    """What was decided about drafts and the log."""
    spec, log = config.spec, f"a state log of {config.num_log_rows} rows"
    if spec is None:
        return log if config.num_log_rows else ""
    shape = spec.shape
    form = "chains" if shape.is_chain else f"trees of topk {shape.topk},"
    size = f"up to {form} {shape.steps} deep, {shape.nodes} nodes"
    kept = log if spec.state == "log" else f"states kept by {spec.state}"
    chosen = "chosen every round, " if spec.is_automatic else ""
    return f"drafts by {spec.proposer}, {chosen}{size}, {kept}"

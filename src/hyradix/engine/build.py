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

from hyradix.config import EngineConfig, ModelFacts, Settings, check_settings, dtype_on, resolve
from hyradix.engine.device import device_facts
from hyradix.engine.engine import Engine
from hyradix.engine.messages import EngineInfo
from hyradix.engine.model_source import ModelSource, find_source
from hyradix.engine.runners import measure, start_runner
from hyradix.engine.warmup import read_prompts, run_warmup
from hyradix.models.head_names import random_heads
from hyradix.models.loader import load_config, load_model, model_facts
from hyradix.text.tokenizer import Tokenizer

logger = logging.getLogger("hyradix.engine")

Progress = Callable[[str, int, int], None]


def build_engine(settings: Settings, on_progress: Progress, *, backend: str = "auto") -> Engine:
    """Load everything; returns when the first request could run. Raises ``HyradixError``.

    backend: of the kernels; the device's own unless told (tests).
    """
    started = time.monotonic()
    check_settings(settings)
    prompts = read_prompts(settings)
    source = find_source(settings, on_progress)
    if source.note:
        logger.warning("%s", source.note)
    device = device_facts(settings.device, memory_fraction=settings.memory_fraction)
    tokenizer = Tokenizer.from_dir(source.text)
    facts = _facts(settings, source, tokenizer, device.kind)
    config = resolve(settings, facts, device)
    model = load_model(
        source.model,
        dtype=config.dtype,
        load_format="dummy" if source.is_random else "auto",
        backend=backend,
        device=config.device,
        proposer=config.spec.proposer if config.spec is not None else None,
        max_context=config.max_context,
        on_progress=on_progress,
    )
    if device.kind == "cuda":
        measured = measure(model, config, settings.memory_fraction, on_progress)
        config = resolve(settings, facts, measured)
    runner, costs = start_runner(model, config, on_progress)
    info = _info(config, facts, source.text, time.monotonic() - started)
    engine = Engine(config, runner, tokenizer, info, costs=costs)
    if prompts:
        run_warmup(engine, prompts, settings, source.text, tokenizer, on_progress)
    return engine


def _facts(settings: Settings, source: ModelSource, tokenizer: Tokenizer, kind: str) -> ModelFacts:
    dtype = dtype_on(kind, settings.dtype)
    heads = random_heads(load_config(source.model)) if source.is_random else None
    facts = model_facts(source.model, dtype, device=kind, name=source.name, heads=heads)
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

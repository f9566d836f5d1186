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
from hyradix.engine.demo import DEMO, demo_directory
from hyradix.engine.device import device_facts
from hyradix.engine.engine import Engine
from hyradix.engine.messages import EngineInfo
from hyradix.engine.runners import measure, start_runner
from hyradix.engine.warmup import read_prompts, run_warmup
from hyradix.models.checkpoint import find_directory
from hyradix.models.loader import load_model, model_facts
from hyradix.text.tokenizer import Tokenizer

logger = logging.getLogger("hyradix.engine")

Progress = Callable[[str, int, int], None]


def find_model(name: str, on_progress: Progress | None = None) -> Path:
    """The directory of a model: ``demo``, a path, or a hub name. Raises ``ModelLoadError``."""
    if name == DEMO:
        return demo_directory()
    return find_directory(name, on_progress=on_progress).resolve()


def build_engine(settings: Settings, on_progress: Progress, *, backend: str = "auto") -> Engine:
    """Load everything; returns when the first request could run. Raises ``HyradixError``.

    backend: of the kernels; the device's own unless told (tests).
    """
    started = time.monotonic()
    check_settings(settings)
    prompts = read_prompts(settings)
    directory = find_model(settings.model, on_progress)
    device = device_facts(settings.device, memory_fraction=settings.memory_fraction)
    tokenizer = Tokenizer.from_dir(directory)
    facts = _facts(settings, directory, tokenizer, device.kind)
    config = resolve(settings, facts, device)
    model = load_model(
        directory,
        dtype=config.dtype,
        backend=backend,
        device=config.device,
        proposer=config.spec.proposer if config.spec is not None else None,
        max_context=config.max_context,
        on_progress=on_progress,
    )
    if device.kind == "cuda":
        config = resolve(settings, facts, measure(model, config, settings.memory_fraction))
    runner, costs = start_runner(model, config, on_progress)
    info = _info(config, facts, directory, time.monotonic() - started)
    engine = Engine(config, runner, tokenizer, info, costs=costs)
    if prompts:
        run_warmup(engine, prompts, settings, directory, tokenizer, on_progress)
    return engine


def _facts(settings: Settings, directory: Path, tokenizer: Tokenizer, kind: str) -> ModelFacts:
    dtype = dtype_on(kind, settings.dtype)
    name = "hyradix-demo" if settings.model == DEMO else settings.model.rstrip("/")
    if Path(name).is_dir():
        name = directory.name
    facts = model_facts(directory, dtype, device=kind, name=name)
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

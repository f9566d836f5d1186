"""Warm-up prompts: prefixes that the first real request shall find in the cache.

Owns: reading the file and running each prompt through the whole pipeline for one new token, which
leaves a state at the prompt's exact end. What to warm: the shortest prefix that many requests
share (a system prompt), since a state serves only what continues it.
Read next: ``engine.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyradix.config import Settings
from hyradix.engine.engine import Engine
from hyradix.errors import ConfigError, HyradixError
from hyradix.request import Boundary, Request, SamplingParams
from hyradix.text.chat_template import ChatTemplate
from hyradix.text.tokenizer import Tokenizer


def run_warmup(
    engine: Engine,
    prompts: list[Any],
    settings: Settings,
    directory: Path,
    tokenizer: Tokenizer,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Run every prompt of ``read_prompts``. Raises ``ConfigError``."""
    path = settings.warmup_prompts_file
    template = ChatTemplate.from_dir(directory, tokenizer)
    for number, prompt in enumerate(prompts):
        on_progress("warm-up prompts", number, len(prompts))
        try:
            ids, boundaries = _encode(prompt, tokenizer, template)
        except HyradixError as error:
            raise ConfigError(f"{path}: prompt {number}: {error.message}") from error
        request = Request(
            request_id=f"warmup-{number}",
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            seed=0,
            boundaries=boundaries,
            pin=settings.pin,
        )
        refusal = engine.add(request)
        if refusal is not None:
            raise ConfigError(f"{path}: prompt {number}: {refusal.error}")
        while engine.has_work():
            engine.step()
    on_progress("warm-up prompts", len(prompts), len(prompts))


def read_prompts(settings: Settings) -> list[Any]:
    """The warm-up prompts, [] without a file. Raises ``ConfigError``; loads nothing else."""
    if settings.warmup_prompts_file is None:
        return []
    path = Path(settings.warmup_prompts_file)
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="warmup_prompts_file") from error
    is_valid = isinstance(prompts, list) and all(isinstance(p, (str, list)) for p in prompts)
    if not is_valid:
        raise ConfigError(
            f"{path} must hold a list of strings or of message lists", param="warmup_prompts_file"
        )
    return list(prompts)


def _encode(
    prompt: str | list[dict[str, Any]], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[bytes, tuple[Boundary, ...]]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt).astype("<i4").tobytes(), ()
    rendered = template.render(prompt, add_generation_prompt=False)
    return rendered.token_ids.astype("<i4").tobytes(), rendered.boundaries

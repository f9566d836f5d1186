from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hyradix.config import DeviceFacts, Settings, resolve
from hyradix.engine.build import build_engine
from hyradix.engine.demo import demo_directory
from hyradix.engine.llm import LLM
from hyradix.errors import ConfigError
from hyradix.models.loader import model_facts
from hyradix.request import SamplingParams


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"states": 0}, {"policy": "best"}])
def test_settings_are_checked_before_anything_is_read(
    options: dict[str, object], tmp_path: Path
) -> None:
    settings = Settings.from_options(model=str(tmp_path), **options)
    (name,) = options
    with pytest.raises(ConfigError, match=f"--{name}"):
        build_engine(settings, lambda *_: None)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_slots": 10**12},
        {"states": 10**9},
    ],
)
def test_memory_that_cannot_be_had_is_refused(options: dict[str, object]) -> None:
    settings = Settings.from_options(**{"kv_slots": 64, "states": 32, **options})
    with pytest.raises(ConfigError, match="cannot be allocated; lower --kv-slots"):
        build_engine(settings, lambda *_: None)


@pytest.mark.parametrize("options", [{}, {"spec": "ngram", "spec_steps": 3, "spec_state": "log"}])
def test_a_log_that_cannot_be_had_is_not_blamed_on_the_pools(options: dict[str, object]) -> None:
    small = {"kv_slots": 64, "states": 32, "decode_log": 10**9}
    settings = Settings.from_options(**small, **options)
    with pytest.raises(ConfigError, match=r"for drafts and logs.*lower --max-requests, --decode-l"):
        build_engine(settings, lambda *_: None)


def test_an_end_that_the_vocabulary_lacks_ends_nothing() -> None:
    """A config made smaller by hand: ``min_tokens`` looked for it among the logits."""
    facts = replace(model_facts(demo_directory()), eos_token_ids=(9, 8192))
    config = resolve(Settings(), facts, DeviceFacts(kind="cpu", free_bytes=1 << 33))
    assert config.eos_token_ids == (9,)


SHORT: dict[str, object] = {"max_requests": 2, "kv_slots": 64, "states": 4, "num_threads": 1}


@pytest.mark.parametrize("max_context", [2, 64])
@pytest.mark.parametrize(
    "options", [{}, {"decode_log": 2}, {"spec": "mtp"}, {"spec": "ngram", "spec_steps": 3}], ids=str
)
def test_the_shortest_contexts_start(options: dict[str, object], max_context: int) -> None:
    """Kernels are compiled and rounds timed on made-up rows, which must fit as well."""
    llm = LLM("demo", max_context=max_context, use_tqdm=False, **SHORT, **options)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    (result,) = llm.generate([[100]], params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == min(5, max_context - 1)


def test_a_context_without_room_for_a_reply_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-context 1 has no room"):
        build_engine(Settings.from_options(max_context=1), lambda *_: None)

"""``random_weights``: an engine on a config alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hyradix import LLM, SamplingParams
from hyradix.config import Settings
from hyradix.engine.model_source import find_source
from hyradix.errors import ConfigError, ModelLoadError
from tests.support.real_server import ROOT

CPU25M = ROOT / "benchmarks/configs/cpu25m.json"
SMALL: dict[str, object] = {
    "max_requests": 2, "kv_slots": 256, "states": 6, "num_threads": 1, "max_context": 128,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def config_with(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "small.json"
    raw = json.loads(CPU25M.read_text()) | {"num_hidden_layers": 4, "hidden_size": 96}
    path.write_text(json.dumps(raw | changes))
    return path


def test_ids_and_text_with_the_demo_models_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_with(tmp_path, vocab_size=20_000)
    with caplog.at_level(logging.WARNING):
        llm = LLM(random_weights=str(config), use_tqdm=False, **SMALL)
    assert "small.json has no tokenizer" in caplog.text
    info = llm.engine.info
    assert (info.model_name, info.vocab_size) == ("random-small", 20_000)
    one, two, text = llm.generate([[19_999, 5, 12_345], [19_999, 5, 12_345], "Once"], GREEDY)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert len(text.outputs[0].token_ids) == 6
    again = LLM(random_weights=str(config), use_tqdm=False, **SMALL)
    (same,) = again.generate([[19_999, 5, 12_345]], GREEDY, use_tqdm=False)
    assert same.outputs[0].token_ids == one.outputs[0].token_ids


def test_drafts_by_a_head_of_random_weights(tmp_path: Path) -> None:
    options = {**SMALL, "spec": "mtp", "spec_topk": 1, "spec_steps": 2}
    config = str(config_with(tmp_path))
    llm = LLM(random_weights=config, use_tqdm=False, **options)
    plain = LLM(random_weights=config, use_tqdm=False, **SMALL)
    prompt = [list(range(100, 120))]
    (drafted,), (expected,) = (x.generate(prompt, GREEDY, use_tqdm=False) for x in (llm, plain))
    assert drafted.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.stats().num_draft_rounds > 0


def test_a_tokenizer_beside_the_config_is_used(tmp_path: Path) -> None:
    config_with(tmp_path).rename(tmp_path / "config.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "config.json"):
        source = find_source(Settings(random_weights=str(path)))
        assert (source.model, source.text) == (tmp_path, tmp_path)
        assert source.name == f"random-{tmp_path.name}"


def test_refusals(tmp_path: Path) -> None:
    config = config_with(tmp_path, vocab_size=500)
    with pytest.raises(ConfigError, match="vocabulary of 500 is too small"):
        find_source(Settings(random_weights=str(config)))
    with pytest.raises(ConfigError, match="cannot be had with --model some"):
        find_source(Settings(random_weights=str(config), model="some/where"))
    with pytest.raises(ConfigError, match=r"there is no .*gone\.json"):
        find_source(Settings(random_weights=str(tmp_path / "gone.json")))
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        find_source(Settings(random_weights=str(broken)))

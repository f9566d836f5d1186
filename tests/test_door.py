"""Values of the wrong type are named at the door, not somewhere inside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyradix.config import Settings, check_settings
from hyradix.engine.llm import _as_params, _as_prompts
from hyradix.errors import ConfigError, InvalidParameterError, ModelLoadError
from hyradix.models import checkpoint
from hyradix.models.loader import load_config
from hyradix.request import SamplingParams
from hyradix.text.messages import normalize


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("logit_bias", {5: 1.0, "6": 1.0}),
        ("stop", 7),
        ("n", None),
        ("repetition_penalty", 1e-300),
    ],
)
def test_sampling_parameters_name_the_field(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=name) as caught:
        SamplingParams(**{name: value}).validate(vocab_size=100)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("states", "x"), ("prefix_cache", "on"), ("kv_slots", 1.5)]
)
def test_settings_name_the_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        Settings.from_options(**{name: value})


def test_a_model_may_be_a_path() -> None:
    assert Settings.from_options(model=Path("some") / "where").model == str(Path("some") / "where")


def test_a_million_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-threads"):
        check_settings(Settings.from_options(num_threads=1_000_000))


def test_prompts_and_parameters_of_the_wrong_form() -> None:
    for prompts in (None, 5):
        with pytest.raises(InvalidParameterError):
            _as_prompts(prompts)
    for params in (5, {"n": 1}, [5]):
        with pytest.raises(InvalidParameterError):
            _as_params(params, 1)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="role"):
        normalize([{"role": "bad", "content": "x"}])


@pytest.mark.parametrize("field", ["rope_parameters", "text_config"])
def test_a_config_field_of_the_wrong_form(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", field: 5}))
    with pytest.raises(ModelLoadError):
        load_config(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="I8"):
        checkpoint.weights_in([tmp_path / "model.safetensors"])

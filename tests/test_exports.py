"""What the package offers by name."""

from __future__ import annotations

import importlib.util

import pytest

import hyradix


def test_all_is_what_we_promise() -> None:
    assert hyradix.__all__ == ["LLM", "SamplingParams", "__version__"]


def test_sampling_params_load_on_first_use() -> None:
    from hyradix.request import SamplingParams

    assert hyradix.SamplingParams is SamplingParams


@pytest.mark.skipif(
    importlib.util.find_spec("hyradix.engine.llm") is None, reason="there is no offline LLM yet"
)
def test_the_offline_llm_is_named() -> None:
    assert "LLM" in vars(hyradix) or hyradix._HOMES["LLM"] == "hyradix.engine.llm"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hyradix.nothing


def test_the_version_is_a_version() -> None:
    assert all(part.isdigit() for part in hyradix.__version__.split("."))

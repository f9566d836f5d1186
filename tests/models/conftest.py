"""Tiny random checkpoints of every family, written by transformers."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import build
from tests.support.kimi_checkpoints import KIMI

FAMILIES = [
    "qwen3_5",
    "qwen3_5_conv2",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_next_moe",
    "granite",
    "granite_dense",
    "nemotron_h",
    "nemotron_h_latent",
    "bamba",
    *KIMI,
]


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request, tmp_path_factory):
    """(transformers model, directory it was saved to)."""
    model = build(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory

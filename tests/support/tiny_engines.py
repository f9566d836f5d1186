"""Engines on a tiny random checkpoint of each family, made so that drafts are sometimes right.

Random weights say something new at every token, and prompt lookup then finds nothing. Here
``NUM_SPOKEN`` tokens have an output row far larger than the others' (untied, whatever the family
does): nearly all that is said is one of them, which of them still depends on everything before.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hyradix.engine.demo import demo_directory
from hyradix.text.tokenizer import Tokenizer
from tests.oracles.schedules import Sizes
from tests.support.checkpoints import build
from tests.support.demo import Engines

FAMILIES = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_next_moe",
    "granite",
    "granite_dense",
    "nemotron_h",
    "bamba",
    "kimi_linear",
)
RECURRENCES = {"gdn": "qwen3_5", "mamba2": "granite_dense", "kda": "kimi_linear"}
"""A family of each."""
NUM_SPOKEN = 4
SIZES = Sizes(
    token_ids=range(10, 97),
    documents=(60, 100, 150),
    longest=300,
    max_tokens=24,
    num_requests=(5, 6),
)


def make_engines(family: str, directory: Path, **placed: str) -> Engines:
    """On a checkpoint written to ``directory``; its texts are the demo tokenizer's.

    placed: backend, device, dtype.
    """
    model = build(family)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(model.config.vocab_size, model.config.hidden_size, generator=generator)
    head[10 : 10 + NUM_SPOKEN] *= 20.0
    save_file({**weights, "lm_head.weight": head}, directory / "model.safetensors")
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    return Engines(directory, Tokenizer.from_dir(demo_directory()), **placed)

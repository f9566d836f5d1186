"""A model as small as can be, and engines that run it by any backend, for tests of Triton's."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hyradix.engine.demo import demo_directory
from hyradix.kernels.ops import load_ops
from hyradix.models.decoder import Decoder
from hyradix.models.loader import DTYPES, build_model, init_random, load_config, model_facts
from hyradix.spec_config import ProposerName
from hyradix.text.tokenizer import Tokenizer
from tests.support.demo import Engines, start_synchronous

VOCAB = 29
CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
"""One recurrent layer, one of attention."""


def load(directory: Path, backend: str, device: str = "cpu", dtype: str = "float32") -> Decoder:
    """The model with the same random weights on every device; ``directory`` gets its config."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(directory)
    ops = load_ops(backend, device=device, dtype=DTYPES[dtype])
    return build_model(config, init_random(config, seed=3), ops, dtype=dtype)


class TinyEngines(Engines):
    """Engines on the model, whose ids are some tokenizer's; steps run one at a time."""

    start = staticmethod(start_synchronous)

    def __init__(self, directory: Path, backend: str, device: str, dtype: str) -> None:
        self._model = load(directory, backend, device, dtype)
        self.directory = directory
        self.dtype = dtype
        self.tokenizer = Tokenizer.from_dir(demo_directory())
        has_type = self._model.ops.dtype != torch.float32
        self.facts = model_facts(directory, dtype, device="cuda" if has_type else "cpu")

    def model(self, proposer: ProposerName | None = None) -> Decoder:
        """One model for all: there are no heads."""
        return self._model

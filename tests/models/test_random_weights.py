"""Random weights: drawn one by one, on any device, the same for the same seed and name."""

from __future__ import annotations

import json

import pytest
import torch

from hyradix.models.builder import DecoderBuilder
from hyradix.models.loader import DTYPES, init_random, load_config, load_model, random_weights
from hyradix.models.random_weights import RandomTensor
from hyradix.models.registry import FAMILIES
from tests.support.real_server import ROOT

CONFIGS = ROOT / "benchmarks/configs"
CPU25M = CONFIGS / "cpu25m.json"
PUBLIC = ("Qwen3.5-0.8B", "Granite-4.0-H-Tiny", "Nemotron-H-8B", "Bamba-9B",
          "Kimi-Linear-48B-A3B-Instruct", "Qwen3-Next-80B-A3B-Instruct")  # fmt: skip


def test_a_weight_depends_on_seed_and_name_alone():
    config = load_config(CPU25M)
    one, other = random_weights(config, 1), random_weights(config, 2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[name].read(), one[name].read())
    assert torch.equal(one[name].read(), init_random(config, 1)[name])
    assert not torch.equal(one[name].read(), other[name].read())
    assert not torch.equal(one[name].read(), one["model.layers.1.mlp.up_proj.weight"].read())


def test_matrices_are_drawn_in_the_type_asked_for():
    drawn = random_weights(load_config(CPU25M), dtype="bfloat16")
    matrix = drawn["model.layers.0.mlp.up_proj.weight"].read()
    assert matrix.dtype == torch.bfloat16
    assert matrix.float().std().item() == pytest.approx(0.02, rel=0.02)
    for name in ("linear_attn.A_log", "linear_attn.dt_bias", "input_layernorm.weight"):
        assert drawn[f"model.layers.0.{name}"].read().dtype == torch.float32


def test_a_config_file_is_enough_and_weights_are_drawn_layer_by_layer(monkeypatch):
    """A weight is drawn when its layer is built, and not before the layer before it is done."""
    news, layers = [], []
    read = RandomTensor.read

    def noted(self):
        layers.append(int(self.name.split(".")[2]) if ".layers." in self.name else None)
        return read(self)

    monkeypatch.setattr(RandomTensor, "read", noted)
    model = load_model(
        CPU25M, load_format="dummy", on_progress=lambda *x: news.append(x), max_context=64
    )
    assert news == [("weights", i + 1, len(news)) for i in range(len(news))]
    assert model.config.vocab_size == 8192
    inner = [layer for layer in layers if layer is not None]
    assert inner == sorted(inner)
    assert set(inner) == set(range(8))


class Packing:
    """Operations that only pack: each gives back what it was given."""

    name = "torch"

    def __getattr__(self, name):
        assert name.startswith("pack_")
        return lambda *weights: weights


@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_is_built_in_host_memory_of_weights_that_lie_elsewhere(name):
    """On a device without memory an operation that mixes devices raises."""
    config = load_config(CONFIGS / f"{name}.json")
    kinds = dict.fromkeys(config.blocks)
    first = {kind: config.blocks.index(kind) for kind in kinds}
    sources = random_weights(config)
    builder = DecoderBuilder(config, FAMILIES[config.family], Packing(), DTYPES["bfloat16"], 64)
    for i in first.values():
        prefix = f"model.layers.{i}."
        layer = {
            name[len(prefix) :]: torch.empty(source.shape, device="meta")
            for name, source in sources.items()
            if name.startswith(prefix)
        }
        builder._layers.layer(i, layer)


def test_vectors_of_every_family_are_what_models_start_with(tmp_path):
    for name in PUBLIC:
        config = load_config(CONFIGS / f"{name}.json")
        for key, source in random_weights(config).items():
            if len(source.shape) == 1:
                assert torch.isfinite(source.read()).all(), key


def test_heads_are_drawn_too():
    raw = json.loads(CPU25M.read_text())
    drawn = random_weights(load_config(CPU25M), head="mtp")
    assert drawn["mtp.fc.weight"].read().shape == (raw["hidden_size"], 2 * raw["hidden_size"])

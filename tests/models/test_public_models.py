"""Configs of public models: every weight that transformers would make, none else; and refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyradix.errors import ModelLoadError
from hyradix.models.loader import load_config
from hyradix.models.registry import FAMILIES, find_family
from hyradix.models.shapes import expected_shapes
from tests.support.real_server import ROOT

CONFIGS = ROOT / "benchmarks/configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "cpu25m")


def read(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def parse(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_config(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_parameters_as_transformers_makes(name, tmp_path):
    """Of the text part; with the router's correction, which is a buffer there."""
    raw = read(name)
    config = parse(tmp_path, raw)
    ours = sum(math.prod(s) for s in expected_shapes(config, FAMILIES[config.family]).values())
    text = {key: value for key, value in raw.get("text_config", raw).items() if key[0] != "_"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    corrections = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    theirs = sum(tensor.numel() for tensor in [*model.parameters(), *corrections])
    assert ours == theirs
    assert ours - sum(b.numel() for b in corrections) == raw["_check"]["params_text"]


GRANITE, NEMOTRON, BAMBA = "Granite-4.0-H-Tiny", "NVIDIA-Nemotron-3-Nano-30B-A3B", "Bamba-9B"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (GRANITE, {"attention_bias": True}, "attention_bias"),
        (GRANITE, {"mamba_proj_bias": True}, "mamba_proj_bias"),
        (GRANITE, {"hidden_act": "gelu"}, "gelu"),
        (GRANITE, {"normalization_function": "layernorm"}, "layernorm"),
        (GRANITE, {"position_embedding_type": "alibi"}, "alibi"),
        (GRANITE, {"layer_types": ["mamba"] * 39}, "40 layers"),
        (GRANITE, {"layer_types": ["mamba"] * 39 + ["swa"]}, "unknown: .'swa'"),
        (GRANITE, {"mamba_d_head": 32}, "mamba_expand times hidden_size"),
        (GRANITE, {"mamba_n_groups": 5}, "multiple"),
        (GRANITE, {"num_experts_per_tok": 65}, "65 experts for each token, of 64"),
        (GRANITE, {"residual_multiplier": "much"}, "residual_multiplier must be a float"),
        (BAMBA, {"mlp_bias": True}, "mlp_bias"),
        (BAMBA, {"attention_bias": True}, "attention_bias"),
        (BAMBA, {"attn_layer_indices": [32]}, "layers of 32"),
        (BAMBA, {"attn_rotary_emb": 128}, "attn_rotary_emb 128"),
        (BAMBA, {"time_step_limit": [0.0]}, "wrong form"),
        (BAMBA, {"architectures": 1, "model_type": None}, "wrong form"),
        (BAMBA, {"partial_rotary_factor": math.inf}, "wrong form"),
        (NEMOTRON, {"use_bias": True}, "use_bias"),
        (NEMOTRON, {"mlp_bias": True}, "mlp_bias"),
        (NEMOTRON, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        (NEMOTRON, {"sliding_window": 4096}, "sliding_window"),
        (NEMOTRON, {"hybrid_override_pattern": "MEM*"}, "must name 52 layers"),
        (NEMOTRON, {"hybrid_override_pattern": "M" * 51 + "X"}, "unknown: .'X'"),
        (NEMOTRON, {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts"),
        (NEMOTRON, {"n_group": 3}, "3 groups"),
        (NEMOTRON, {"n_group": 64, "topk_group": 2}, "6 experts for each token, of 4"),
        (NEMOTRON, {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
    ],
)
def test_switches_that_are_refused(name, changes, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        parse(tmp_path, {**read(name), **changes})


def test_patterns_and_lists_of_layers_say_the_same(tmp_path):
    raw = read("Nemotron-H-8B")
    config = parse(tmp_path, raw)
    assert config.blocks[:2] == (("recurrent", "none"), ("none", "dense"))
    assert config.layers.count("attention") == raw["hybrid_override_pattern"].count("*")
    words = {"M": "mamba", "*": "attention", "-": "mlp"}
    kinds = [words[letter] for letter in raw.pop("hybrid_override_pattern")]
    assert parse(tmp_path, {**raw, "layers_block_type": kinds}) == config


def test_granite_knows_positions_only_where_its_config_says_so(tmp_path):
    raw = read("Granite-4.0-H-Micro")
    assert parse(tmp_path, raw).rotary_dim == 0
    raw["position_embedding_type"] = "rope"
    assert parse(tmp_path, raw).rotary_dim == 64
    half = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
    config = parse(tmp_path, {**raw, "rope_parameters": half, "partial_rotary_factor": 0.25})
    assert (config.rotary_dim, config.rope_theta) == (64, 300.0), "transformers reads no factor"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_is_what_is_loaded(name, tmp_path):
    raw = read(name)
    planned, loaded = find_family(raw).parse_cache(raw), parse(tmp_path, raw)
    for field in planned.__slots__:
        assert getattr(planned, field) == getattr(loaded, field)

"""``kimi_linear``: what its config says, what is refused, names, pools, the bounded decay."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig

from hyradix.errors import ModelLoadError
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.layers.kimi_delta import KimiDelta
from hyradix.models.kimi_linear import map_name, parse_config
from hyradix.models.loader import init_random, load_config, load_model
from hyradix.models.registry import FAMILIES
from hyradix.models.shapes import expected_shapes
from tests.support.kimi_checkpoints import build_kimi, kimi_config
from tests.support.player import Player
from tests.support.real_server import ROOT

RELEASE = json.loads((ROOT / "benchmarks/configs/Kimi-Linear-48B-A3B-Instruct.json").read_text())


def changed(**changes):
    raw = kimi_config("kimi_linear")
    linear = raw["linear_attn_config"]
    return {**raw, "linear_attn_config": {**linear, **changes.pop("linear", {})}, **changes}


def test_the_release_has_its_parameters_and_layers():
    config = parse_config(RELEASE, {})
    shapes = expected_shapes(config, FAMILIES["kimi_linear"])
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    biases = sum(size for name, size in sizes.items() if name.endswith("correction_bias"))
    assert sum(sizes.values()) - biases == RELEASE["_check"]["params_text"]
    attention = [i for i, kind in enumerate(config.layers) if kind == "attention"]
    assert attention == [3, 7, 11, 15, 19, 23, 26]
    assert config.mlps == ("dense", *["moe"] * 26)
    assert config.latent is not None
    assert (config.latent.rank, config.latent.shared, config.max_position) == (512, 64, 1 << 20)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.shared_size) == (256, 8, 1024)
    assert (config.moe.scoring, config.moe.scale) == ("sigmoid", 2.446)
    assert config.eos_token_ids == (163_586,)
    assert config.recurrent_shape(2).row_shapes["g"] == ((32, 128), 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": 8}, "q_lora_rank 8 is not supported"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
        ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func 'tanh'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"linear": {"kda_layers": [1, 2]}}, "each of 5 layers once"),
        ({"linear": {"kda_layers": [0, 1, 3]}}, "each of 5 layers once"),
        ({"linear": {"full_attn_layers": None}}, "full_attn_layers must be a list"),
        ({"linear": {"gate_lower_bound": 5.0}}, "gate_lower_bound must be negative"),
        ({"linear": {"head_dim": 0}}, "head_dim must be positive"),
        ({"linear_attn_config": None}, "linear_attn_config must be a dict"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types and linear_attn_config"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must name 5 layers"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ({"num_experts_per_token": 9}, "9 experts for each token"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be positive"),
    ],
)
def test_configs_that_are_refused(changes, words):
    with pytest.raises(ModelLoadError, match=words):
        parse_config(changed(**changes), {})


def test_the_config_that_transformers_makes_says_the_same():
    raw = kimi_config("kimi_linear")
    linear = raw.pop("linear_attn_config")
    kinds = ["full_attention" if i in linear["full_attn_layers"] else "linear_attention"
             for i in range(1, 6)]  # fmt: skip
    made = KimiLinearConfig(
        **{key: value for key, value in raw.items() if key != "model_type"},
        layer_types=kinds,
        linear_head_dim=linear["head_dim"],
        linear_num_heads=linear["num_heads"],
        linear_conv_kernel_dim=linear["short_conv_kernel_size"],
    ).to_dict()
    assert "linear_attn_config" not in made
    assert parse_config(made, {}) == parse_config({**made, "linear_attn_config": linear}, {})
    with pytest.raises(ModelLoadError, match="linear_head_dim must be a int"):
        parse_config({**made, "linear_head_dim": None}, {})


def test_which_layers_have_experts():
    def mlps(**changes):
        return "".join(kind[0] for kind in parse_config(changed(**changes), {}).mlps)

    assert mlps() == "dmmmm"
    assert mlps(first_k_dense_replace=0) == "mmmmm"
    assert mlps(moe_layer_freq=2) == "ddmdm"
    assert mlps(num_experts=0) == "ddddd"
    assert mlps(mlp_layer_types=["sparse", *["dense"] * 4]) == "mdddd"


def test_groups_are_used_unless_the_config_says_not():
    raw = changed(num_expert_group=4, topk_group=2)
    assert parse_config(raw, {}).moe.num_groups == 4
    assert parse_config({**raw, "use_grouped_topk": False}, {}).moe.num_groups == 1


def test_names_of_releases_and_of_transformers():
    for name, flat in [
        ("block_sparse_moe.experts.7.w1.weight", "mlp.experts.7.gate_proj.weight"),
        ("block_sparse_moe.experts.7.w3.weight", "mlp.experts.7.up_proj.weight"),
        ("block_sparse_moe.experts.7.w2.weight", "mlp.experts.7.down_proj.weight"),
        ("block_sparse_moe.shared_experts.up_proj.weight", "mlp.up_proj.weight"),
        ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("block_sparse_moe.up_proj.weight", "mlp.up_proj.weight"),  # a dense MLP, transformers'
        ("mlp.up_proj.weight", "mlp.up_proj.weight"),  # a dense MLP, released
        ("self_attn.q_conv1d.weight", "self_attn.q_conv1d.weight"),
    ]:
        assert map_name(f"model.layers.3.{name}") == f"model.layers.3.{flat}"


def test_a_checkpoint_with_released_names_is_the_same(tmp_path):
    """transformers puts the dense MLP of layer 0 under ``block_sparse_moe``; releases do not."""
    build_kimi("kimi_linear").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    renamed = {name.replace(dense, "model.layers.0.mlp."): t for name, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    (tmp_path / "config.json").write_text(json.dumps(kimi_config("kimi_linear")))
    first = Player(load_model(tmp_path))
    save_file(renamed, tmp_path / "model.safetensors")
    second = Player(load_model(tmp_path))
    for player in (first, second):
        player.step({player.add(list(range(9))): 9})
    assert torch.equal(first.logits_of(0), second.logits_of(0))


@pytest.fixture
def random_model(tmp_path):
    """Written without transformers: random weights, only config.json on disk."""
    (tmp_path / "config.json").write_text(json.dumps(kimi_config("kimi_linear_groups")))
    return load_model(tmp_path, load_format="dummy")


def test_one_row_per_token_and_no_values(random_model):
    """``Pools`` asserts that the bytes are those that were computed."""
    pools = Player(random_model).runner.pools
    config = random_model.config
    assert pools.kv.k.shape == (2, 1025, 1, 24 + 7)
    assert pools.memory.v == ()
    assert config.kv_bytes_per_slot(4) == 2 * (24 + 7) * 4
    assert pools.states.conv.shape[2:] == (1, 3 * 5 * 16)
    pools.kv.poison([3])
    assert pools.kv.k[:, 3].isnan().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_no_shared_expert_is_written_as_one_without_width(tmp_path):
    theirs = build_kimi("kimi_linear", num_shared_experts=0)
    theirs.save_pretrained(tmp_path)
    player = Player(load_model(tmp_path))
    tokens = list(range(5, 30))
    player.step({player.add(tokens): len(tokens)})
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert (player.logits_of(0) - expected).abs().max() <= 1e-4


def test_weights_of_random_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(kimi_config("kimi_linear")))
    tensors = init_random(load_config(tmp_path))
    assert bool((tensors["model.layers.2.self_attn.kv_a_layernorm.weight"] == 1).all())
    assert bool((tensors["model.layers.0.self_attn.o_norm.weight"] == 1).all())


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_decay_bounds_reach_the_kernel(tmp_path, backend, monkeypatch):
    seen = []
    build = KimiDelta.__init__

    def spy(self, ops, index, *rest):
        seen.extend(part for part in rest if isinstance(part, KdaWeights))
        build(self, ops, index, *rest)

    monkeypatch.setattr(KimiDelta, "__init__", spy)
    raw = changed(linear={"gate_lower_bound": -5})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    player = Player(load_model(tmp_path, load_format="dummy", backend=backend))
    assert [weights.lower_bound for weights in seen] == [-5.0] * 3
    player.step({player.add(list(range(20))): 20})
    assert player.logits_of(0).isfinite().all()

"""Draft heads of a checkpoint: which there are, loading one, and why one is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyradix.errors import ModelLoadError
from hyradix.models import checkpoint
from hyradix.models.head_names import HEADS, head_shapes
from hyradix.models.loader import init_random, load_config, load_model, model_facts
from tests.support.checkpoints import COMMON
from tests.support.player import Player

WEIGHTS = "model.safetensors"
SIZES = {"mtp": {"intermediate_size": 56}, "frozen_kv_mtp": {"intermediate_size": 32}}


def write(directory, raw):
    (directory / "config.json").write_text(json.dumps(raw))
    config = load_config(directory)
    tensors = init_random(config)
    for head in HEADS:
        tensors.update(init_random(config, 1, head=head))
    save_file(tensors, directory / WEIGHTS)
    return directory


@pytest.fixture(params=["qwen3_5_text", "qwen3_next"])
def directory(tmp_path, request):
    raw = {"model_type": request.param, "linear_conv_kernel_dim": 4, "num_experts": 0, **COMMON}
    return write(tmp_path, {**raw, "mtp_num_hidden_layers": 1, "draft_heads": SIZES})


def change(directory, **new):
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in new.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / WEIGHTS)


def fails(directory, proposer, *words):
    with pytest.raises(ModelLoadError) as caught:
        load_model(directory, proposer=proposer)
    for word in words:
        assert word in str(caught.value)


def test_facts_name_the_heads_and_their_bytes(directory):
    facts = model_facts(directory)
    assert facts.proposers == ("ngram", "mtp", "frozen_kv_mtp")
    assert facts.draft_kv_bytes == 2 * 2 * 24 * 4
    assert facts.hidden_bytes == 48 * 4
    change(directory, **{"mtp.fc.weight": None})
    assert model_facts(directory).proposers == ("ngram", "frozen_kv_mtp")
    (directory / WEIGHTS).unlink()
    assert model_facts(directory).proposers == ("ngram",)


def test_a_head_is_loaded_only_when_asked_for(directory):
    plain = load_model(directory)
    assert plain.draft_head is None
    assert load_model(directory, proposer="ngram").draft_head is None
    for name in HEADS:
        model = load_model(directory, proposer=name)
        head = model.draft_head
        assert head.name == name
        assert model.weight_bytes == plain.weight_bytes
        shapes = head_shapes(model.config, name)
        assert head.weight_bytes == 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
        assert shapes[f"{name}.layers.0.mlp.down_proj.weight"] == (
            48,
            SIZES[name]["intermediate_size"],
        )


def test_dummy_weights_have_a_head_too(directory):
    (directory / WEIGHTS).unlink()
    assert load_model(directory, load_format="dummy", proposer="mtp").draft_head.name == "mtp"


def test_mlps_are_of_the_targets_size_unless_said(directory):
    raw = json.loads((directory / "config.json").read_text())
    del raw["draft_heads"]
    write(directory, raw)
    load_model(directory, proposer="mtp")
    raw["draft_heads"] = {"mtp": {"intermediate_size": "big"}}
    (directory / "config.json").write_text(json.dumps(raw))
    fails(directory, "mtp", "intermediate_size must be a int")


def test_nested_and_sharded(directory, tmp_path_factory):
    raw = json.loads((directory / "config.json").read_text())
    if raw["model_type"] == "qwen3_next":
        pytest.skip("has no nested form")
    nested = tmp_path_factory.mktemp("nested")
    heads = raw.pop("draft_heads")
    outer = {"model_type": "qwen3_5", "text_config": raw, "draft_heads": heads}
    (nested / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / WEIGHTS).items()
    }
    where = {name: "b.safetensors" if "mtp." in name else "a.safetensors" for name in tensors}
    for shard in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == shard}, nested / shard)
    (nested / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    assert model_facts(nested).proposers == ("ngram", "mtp", "frozen_kv_mtp")
    assert load_model(nested, proposer="frozen_kv_mtp").draft_head.name == "frozen_kv_mtp"
    assert load_model(nested).draft_head is None


def test_heads_that_are_refused_and_why(directory):
    kept = (directory / WEIGHTS).read_bytes()
    fc = torch.zeros(48, 96)
    for new, words in [
        ({"mtp.fc.weight": None}, ["no draft head mtp", "mtp.fc.weight"]),
        ({"mtp.layers.0.linear_attn.A_log": torch.zeros(6)}, ["recurrent layers"]),
        ({"mtp.layers.0.mlp.experts.0.up_proj.weight": fc}, ["mixture of experts"]),
        ({"mtp.layers.1.mlp.up_proj.weight": fc}, ["several layers"]),
        ({"mtp.embed_tokens.weight": fc}, ["embedding of its own"]),
        ({"mtp.norm.weight": None}, ["1 missing: mtp.norm.weight"]),
        ({"mtp.surprise": fc}, ["1 unknown: mtp.surprise"]),
        ({"mtp.fc.weight": fc.T.contiguous()}, ["mtp.fc.weight [96, 48] instead of [48, 96]"]),
    ]:
        change(directory, **new)
        fails(directory, "mtp", *words)
        load_model(directory)
        load_model(directory, proposer="frozen_kv_mtp")
        (directory / WEIGHTS).write_bytes(kept)


def test_normalized_hidden_states_give_the_logits(reference):
    twin, directory = reference
    model = load_model(directory)
    player = Player(model)
    seen = []
    player.runner._on_hidden = lambda batch, hidden: seen.append(model.normalize(hidden))
    row = player.add([5, 9, 11, 2])
    player.step({row: 4})
    expected = twin.model(torch.tensor([[5, 9, 11, 2]])).last_hidden_state[0]
    scale = getattr(twin.config, "logits_scaling", 1.0)  # folded into the norm
    assert torch.allclose(model.ops.tensor(seen[0]) * scale, expected, atol=1e-4)

"""What can be wrong with a checkpoint, and what is right about several forms of one."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyradix.errors import ModelLoadError
from hyradix.kernels.ops import load_ops
from hyradix.models import checkpoint, loader
from hyradix.models.loader import build_model, init_random, load_config, load_model, model_facts
from hyradix.models.stored import StoredTensor, read
from tests.support.checkpoints import COMMON, EXPERTS

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path):
    raw = {
        "model_type": "qwen3_5_text",
        "linear_conv_kernel_dim": 4,
        **COMMON,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(init_random(load_config(tmp_path)), tmp_path / WEIGHTS)
    return tmp_path


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fails(directory, *words, **options):
    with pytest.raises(ModelLoadError) as caught:
        load_model(directory, **options)
    for word in words:
        assert word in str(caught.value)


def test_loads_and_reports_progress(directory):
    seen = []
    model = load_model(directory, on_progress=lambda *news: seen.append(news))
    assert seen[-1][0] == "weights"
    assert seen[-1][1] == seen[-1][2] == len(load_file(directory / WEIGHTS))
    assert model.weight_bytes == model_facts(directory).weight_bytes


def test_dummy_weights_need_no_files(directory):
    (directory / WEIGHTS).unlink()
    assert load_model(directory, load_format="dummy").config.vocab_size == 97


def test_missing_unknown_and_wrong_weights_are_all_listed(directory):
    tensors = load_file(directory / WEIGHTS)
    tensors["model.layers.0.surprise"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, directory / WEIGHTS)
    fails(directory, "1 missing: model.layers.1.mlp.up_proj.weight", "1 unknown: model.layers.0",
          "model.norm.weight [3] instead of [48]")  # fmt: skip


def test_files_that_are_missing_or_damaged(directory):
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: len(data) // 2])
    fails(directory, WEIGHTS, "damaged")
    (directory / WEIGHTS).unlink()
    fails(directory, "no safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / checkpoint.INDEX).write_text(json.dumps(index))
    fails(directory, "model-1.safetensors, model-2.safetensors")
    (directory / "config.json").write_text("{")
    fails(directory, "config.json")
    (directory / "config.json").unlink()
    fails(directory, "has no config.json")


def test_a_file_that_shrinks_while_it_is_read(directory, monkeypatch):
    whole = checkpoint.weights_in

    def shrinking(paths):
        found = whole(paths)
        paths[0].write_bytes(paths[0].read_bytes()[:-8])
        return found

    monkeypatch.setattr(checkpoint, "weights_in", shrinking)
    fails(directory, WEIGHTS, "damaged")


def test_a_load_holds_one_layers_sources_and_maps_no_file(directory, monkeypatch):
    """bfloat16 kept as float32: what was read is let go once it is converted."""
    change_config(directory, num_hidden_layers=12)
    tensors = {name: t.bfloat16() for name, t in init_random(load_config(directory)).items()}
    save_file(tensors, directory / WEIGHTS)
    sizes = {}
    for name, tensor in tensors.items():
        part = name.split("layers.")[-1].split(".")[0]
        sizes[part] = sizes.get(part, 0) + tensor.nbytes
    live, most = 0, 0
    plain = StoredTensor.read

    def watched(self):
        nonlocal live, most
        tensor = plain(self)
        size = tensor.nbytes
        live, most = live + size, max(most, live + size)

        def gone():
            nonlocal live
            live -= size

        weakref.finalize(tensor, gone)
        return tensor

    monkeypatch.setattr(StoredTensor, "read", watched)
    model = load_model(directory)
    assert most <= max(sizes.values()) < model.weight_bytes / 2 / 10
    assert live == 0
    assert str(directory) not in Path("/proc/self/maps").read_text()


def test_sharded(directory):
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == shard}, directory / shard)
    (directory / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    (directory / WEIGHTS).unlink()
    load_model(directory)


def test_configs_that_are_refused(directory):
    for changes, word in [
        ({"model_type": "llama", "architectures": ["Llama"]}, "Qwen3_5ForCausalLM"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"linear_num_key_heads": 4}, "multiple"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
    ]:
        kept = (directory / "config.json").read_text()
        change_config(directory, **changes)
        fails(directory, word)
        (directory / "config.json").write_text(kept)


@pytest.fixture
def sparse(directory):
    """Every other layer is a mixture of experts; stacked, as ``init_random`` makes them."""
    change_config(directory, model_type="qwen3_next", decoder_sparse_step=2, **EXPERTS)
    save_file(init_random(load_config(directory)), directory / WEIGHTS)
    return directory


def test_which_layers_are_mixtures_of_experts(sparse):
    assert load_config(sparse).mlps == ("dense", "moe", "dense", "moe")
    change_config(sparse, mlp_only_layers=[1])
    assert load_config(sparse).mlps == ("dense", "dense", "dense", "moe")
    change_config(sparse, num_experts=0)
    assert load_config(sparse).moe is None
    change_config(sparse, num_experts=8, num_experts_per_tok=9)
    fails(sparse, "9 experts for each token, of 8")


def test_experts_one_by_one_equal_stacked_ones(sparse, monkeypatch):
    whole = read_tensors(sparse, monkeypatch)
    pieces = {}
    for name, tensor in load_file(sparse / WEIGHTS).items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            pieces[name] = tensor
            continue
        for e, one in enumerate(tensor):
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            for piece, rows in zip(parts, one.chunk(len(parts)), strict=True):
                pieces[f"{stem}.{e}.{piece}.weight"] = rows.contiguous()
    save_file(pieces, sparse / WEIGHTS)
    found = read_tensors(sparse, monkeypatch)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    gone = "model.layers.1.mlp.experts.5.up_proj.weight"
    pieces.pop(gone)
    save_file(pieces, sparse / WEIGHTS)
    fails(sparse, f"1 missing: {gone}")


def read_tensors(directory, monkeypatch):
    """What the builder gets."""
    got = {}
    monkeypatch.setattr(
        loader, "build_model", lambda config, sources, *_, **__: got.update(sources)
    )
    load_model(directory)
    got = {name: read(source) for name, source in got.items()}
    monkeypatch.undo()
    return got


def test_nested_form_equals_the_flat_one(directory, tmp_path_factory):
    nested = tmp_path_factory.mktemp("nested")
    text = json.loads((directory / "config.json").read_text())
    raw = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    (nested / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / WEIGHTS).items()
    }
    extra = {"model.visual.patch.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file({**tensors, **extra}, nested / WEIGHTS)
    model = load_model(nested)
    assert model.config.architecture == "Qwen3_5ForConditionalGeneration"
    assert model.config.layers == load_model(directory).config.layers
    for whole, part in ((True, False), (False, True)):
        text["tie_word_embeddings"] = part
        change_config(nested, text_config=text, tie_word_embeddings=whole)
        assert load_config(nested).is_tied == whole, "as transformers writes and reads it"


def test_facts_and_end_of_sequence(directory):
    change_config(directory, eos_token_id=5)
    facts = model_facts(directory)
    assert facts.eos_token_ids == (5,)
    assert facts.kv_bytes_per_slot == 2 * 1 * 2 * 24 * 4
    channels = 2 * 2 * 12 + 6 * 20
    assert facts.state_bytes_per_slot == 3 * 4 * (6 * 12 * 20 + channels * 3)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert model_facts(directory, "bfloat16").eos_token_ids == (7, 9)
    assert model_facts(directory, "bfloat16").weight_bytes * 2 == facts.weight_bytes


def test_old_and_new_rope_keys(directory):
    change_config(directory, rope_theta=5000.0, partial_rotary_factor=0.5)
    assert (load_config(directory).rope_theta, load_config(directory).rotary_dim) == (5000.0, 12)
    change_config(directory, rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 1.0})
    assert (load_config(directory).rope_theta, load_config(directory).rotary_dim) == (7.0, 24)


def test_names_that_are_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "gone"), "./gone", "gone", "owner/gone"):
        with pytest.raises(ModelLoadError, match="director"):
            checkpoint.find_directory(name)
    assert checkpoint.find_directory(str(tmp_path)) == tmp_path


def test_bfloat16_weights_stay_close(directory):
    config = load_config(directory)
    tensors = init_random(config)
    shutil.rmtree(directory)
    assert build_model(config, tensors, load_ops("torch"), dtype="bfloat16").weight_bytes > 0
    assert tensors == {}

"""The trainer from prompts to files, and the files in a package that is loaded again."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import install_drafts
import numpy as np
import prepare_data
import pytest
import torch
import train_drafts
from draft_eval import NUM_STEPS
from draft_model import INTERMEDIATE, make_heads
from draft_tokens import load_chats
from install_drafts import install
from model import Shape
from prepare_data import REPLY_BIT
from prepare_drafts import OPENING, packed, passages, prompt_arrays, take
from safetensors.torch import load_file, save_file
from train import save
from transformers import Qwen3_5ForCausalLM

from hyradix.models.loader import load_model
from tests.training.draft_support import SIZES, TINY, tiny_target

SETS = ("mt_bench", "mt_bench_second", "gsm8k")


def random_chats(count: int, seed: int) -> list[np.ndarray]:
    """Made-up chats of one turn with replies marked."""
    rng = np.random.default_rng(seed)
    chats = []
    for _ in range(count):
        tokens = rng.integers(3, TINY.vocab, rng.integers(8, 20)).astype(np.uint16)
        tokens[6:] |= REPLY_BIT
        chats.append(tokens)
    return chats


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file as `prepare_drafts.py` writes it."""
    arrays = packed(random_chats(60, 0)) | {"order": np.arange(60)}
    for n, name in enumerate(SETS):
        prompts = [chat[:6] for chat in random_chats(3, n + 1)]
        arrays |= packed(prompts, name + "_")
    np.savez_compressed(tmp_path / "drafts.npz", **arrays)
    return tmp_path / "drafts.npz"


@pytest.fixture
def trained(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the tiny target; trained heads in `heads` beside it."""
    package = tmp_path / "package"
    save(tiny_target(), package, {})
    monkeypatch.setattr(train_drafts, "Shape", lambda: TINY)
    monkeypatch.setattr(train_drafts, "INTERMEDIATE", SIZES)
    options = "--rows 8 --length 32 --capacity 4000 --batch-rows 2 --heldout-length 64 "
    options += "--heldout-new 8 --max-steps 3 --steps 3 --minutes 1 --reserve-s 0"
    paths = ["--model", package, "--data", data, "--out", tmp_path / "heads"]
    train_drafts.DraftTrainer(train_drafts.parse_args([*map(str, paths), *options.split()])).run()
    return package


@pytest.mark.slow
def test_from_prompts_to_a_package_with_heads(trained: Path, tmp_path: Path):
    metrics = json.loads((tmp_path / "heads" / "draft_metrics.json").read_text())
    assert metrics["steps"] == 3
    assert 50 <= metrics["written"]["documents"] <= 60
    assert metrics["written"]["reply_tokens"] < metrics["written"]["tokens"] <= 4000
    for head in metrics["heads"].values():
        assert set(head["heldout"]) == set(SETS)
        for found in head["heldout"].values():
            assert len(found["agreement"]) == NUM_STEPS
            assert found["tokens_per_round"]["1"] >= 1.0
    (trained / "README.md").write_text("# Card\n")
    (trained / "NOTICE.md").write_text("# Notices\n")
    before = {p.name: p.read_bytes() for p in trained.iterdir()}
    install(tmp_path / "heads", trained)
    texts = {p.name: p.read_bytes() for p in trained.iterdir()}
    install(tmp_path / "heads", trained)
    assert texts == {p.name: p.read_bytes() for p in trained.iterdir()}
    assert texts["model.safetensors"] == before["model.safetensors"]
    card = texts["README.md"].decode()
    assert card.count("## Draft heads") == 1
    assert card.count("| frozen_kv_mtp |") == len(SETS)
    assert "draft_heads.safetensors" in texts["NOTICE.md"].decode()
    assert json.loads(texts["metrics.json"])["draft_heads"] == metrics
    config = json.loads(texts["config.json"])
    assert config["mtp_num_hidden_layers"] == 1
    assert config["draft_heads"] == {"mtp": {}, "frozen_kv_mtp": {"intermediate_size": 40}}


@pytest.fixture
def package(tmp_path: Path, shipped: Path) -> Path:
    """The shipped folder with random heads of the shipped sizes."""
    folder = tmp_path / "package"
    shutil.copytree(shipped, folder)
    torch.manual_seed(0)
    heads = make_heads(Shape(), INTERMEDIATE)
    tensors = {n: p.detach().bfloat16() for h in heads.values() for n, p in h.table.items()}
    (tmp_path / "heads").mkdir()
    save_file(tensors, tmp_path / "heads" / "draft_heads.safetensors", metadata={"format": "pt"})
    found = {"agreement": [0.5] * 6, "tokens_per_round": {"3": 2.0}}
    metrics = {
        "heads": {n: {"parameters": 1, "heldout": {"gsm8k": found}} for n in INTERMEDIATE},
        "written": {"tokens": 1, "reply_tokens": 1},
        "steps": 1,
        "seconds": 1.0,
    }
    (tmp_path / "heads" / "draft_metrics.json").write_text(json.dumps(metrics))
    install(tmp_path / "heads", folder)
    return folder


@pytest.mark.slow
def test_the_shipped_folder_with_heads_is_loaded_by_both(package: Path, shipped: Path):
    index = json.loads((package / "model.safetensors.index.json").read_text())
    stored = load_file(package / "draft_heads.safetensors")
    for name in stored:
        assert index["weight_map"][name] == "draft_heads.safetensors"
    assert set(index["weight_map"].values()) == {"model.safetensors", "draft_heads.safetensors"}
    assert len(index["weight_map"]) == len(stored) + len(load_file(package / "model.safetensors"))
    model, info = Qwen3_5ForCausalLM.from_pretrained(
        package, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    plain = Qwen3_5ForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert load_model(package, backend="torch").draft_head is None
    for name in INTERMEDIATE:
        head = load_model(package, backend="torch", proposer=name).draft_head
        assert head is not None
        assert head.name == name


def test_heads_that_are_too_large_are_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(install_drafts, "HEADS_LIMIT", 1_000_000)
    with pytest.raises(AssertionError, match="too large"):
        install(tmp_path / "heads", package)


def test_prompts_are_encoded_as_the_template_renders_them(shipped: Path, data: Path):
    prepare_data._start_worker(str(shipped / "tokenizer.json"))
    texts = passages(["One two three. " * 40], 5, random.Random(0))
    assert len(texts) == 5
    assert all(t.startswith("<|im_start|>user\n") and t.endswith(OPENING) for t in texts)
    array = prompt_arrays(texts)[0]
    turns = [{"role": "user", "content": texts[0].split("\n", 1)[1].rsplit("<|im_end|>", 1)[0]}]
    chat = take([[*turns, {"role": "assistant", "content": "Yes."}]], 10_000)[0]
    assert np.array_equal(chat[: len(array)], array)
    assert (chat[len(array) : -1] >= REPLY_BIT).all()
    chats, order = load_chats(str(data), "")
    assert len(chats) == len(order) == 60

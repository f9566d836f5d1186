"""The training model against transformers, checkpoints, and a few steps of the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train
from corpus import SOURCES
from delta_rule import RESET_DECAY, delta_rule_torch
from model import Model, Pieces, Shape
from prepare_data import write
from train import load_weights, save
from transformers import Qwen3_5ForCausalLM

from tests.training.draft_support import TINY

TOLERANCE = 1e-4


def new_model(shape: Shape) -> Model:
    return Model(shape, pieces=Pieces(compiled=False), delta_rule=delta_rule_torch)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Qwen3_5ForCausalLM]:
    """A tiny random model, and transformers' with the same weights from a saved checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = new_model(TINY)
    with torch.no_grad():
        for parameter in model.table.values():  # norms too, so that mistakes show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save(model, folder, {})
    model.load(load_weights(folder))
    return model, Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_ids(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    # Not 0, the padding token, which gets no gradient in transformers' embedding.
    return torch.randint(1, TINY.vocab, (2, length), generator=generator)


@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_logits_equal_transformers(pair, length: int):
    model, other = pair
    ids = random_ids(length)
    with torch.no_grad():
        ours, theirs = model.logits(ids, dtype=torch.float32), other(ids).logits
    assert float((ours - theirs).abs().max()) < TOLERANCE


def test_loss_and_gradients_of_packed_rows_equal_separate_documents(pair):
    """Documents of 1, 70, 2 and 37 tokens share a row; transformers sees them one by one."""
    model, other = pair
    sizes = [1, 70, 2, 37]
    ids = random_ids(sum(sizes))
    position = torch.cat([torch.arange(n) for n in sizes])[None].expand(2, -1)
    targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    targets[:, 5:20] = -100
    parts = torch.cat([other(part).logits for part in ids.split(sizes, 1)], 1)
    expected = torch.nn.functional.cross_entropy(
        parts.flatten(0, 1), targets.flatten(), reduction="none"
    )
    losses = model.losses(ids, position, targets, dtype=torch.float32)
    assert float((losses - expected).detach().abs().max()) < TOLERANCE
    losses.mean().backward()
    expected.mean().backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.table.items():
        error = float((parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm())
        assert error < 1e-3, name
        parameter.grad = theirs[name].grad = None


def test_chunked_delta_rule_equals_the_recurrence():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 75, 2, 8, generator=generator) for _ in range(2))
    v = torch.randn(2, 75, 4, 8, generator=generator)
    g = -torch.rand(2, 75, 4, generator=generator)
    g[:, ::19] = RESET_DECAY
    beta = torch.rand(2, 75, 4, generator=generator)
    unit_q, unit_k = (
        torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, 2) for x in (q, k)
    )
    state, expected = torch.zeros(2, 4, 8, 8), []
    for t in range(75):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", unit_k[:, t], state)
        state = state + torch.einsum("bhk,bhv,bh->bhkv", unit_k[:, t], error, beta[:, t])
        expected.append(torch.einsum("bhk,bhkv->bhv", unit_q[:, t], state) * 8**-0.5)
    got = delta_rule_torch(q, k, v, g, beta, chunk=16)
    assert float((got - torch.stack(expected, 1)).abs().max()) < 1e-5


def test_resuming_from_the_shipped_weights(shipped: Path):
    weights = load_weights(shipped)
    model = new_model(Shape())
    assert weights.keys() == model.table.keys()
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in model.table.items()}
    model.load(weights)
    assert all(torch.equal(p.detach(), weights[n].float()) for n, p in model.table.items())


def test_a_checkpoint_that_lacks_a_tensor_is_refused(shipped: Path):
    weights = load_weights(shipped)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        new_model(Shape()).load(weights)


def test_shipped_configuration_is_the_default_shape(shipped: Path):
    config = json.loads((shipped / "config.json").read_text())
    for key, value in Shape().config_kwargs().items():
        if key == "rope_parameters":
            assert value.items() <= config[key].items()
        else:
            assert config[key] == value, key


@pytest.mark.slow
def test_trainer_runs_every_stage_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    for source in SOURCES[:4]:
        arrays = [rng.integers(3, 500, 30).astype(np.uint16) | (1 << 15) for _ in range(12)]
        write(arrays, tmp_path / f"{source.name}.train.npz")
        write(arrays[:2], tmp_path / f"{source.name}.heldout.npz")
    options = "--tiny --max-steps 2 --batch-tokens 128 --length 64 --long-length 128 --workers 0"

    def run(*extra: str) -> dict:
        monkeypatch.setattr(sys, "argv", [
            "train.py", "--data", str(tmp_path), *options.split(), *extra,
        ])  # fmt: skip
        train.main()
        return json.loads((Path(extra[1]) / "metrics.json").read_text())

    first, second = tmp_path / "first", tmp_path / "second"
    metrics = run("--out", str(first))
    assert [s["steps"] for s in metrics["stages"].values()] == [2, 2, 2]
    assert metrics["tokens"] == 6 * 128
    again = run("--out", str(second), "--resume-from", str(first), "--fractions", "0", "0", "1")
    assert list(again["stages"]) == ["chat"]
    assert f"resumed from {first}" in capsys.readouterr().out
    old, new = load_weights(first), load_weights(second)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = float((new[name].float() - old[name].float()).norm() / old[name].float().norm())
    assert 0 < moved < 0.05

"""From settings to an engine on a device's kernels; the types of a bfloat16 model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyradix.config import Settings
from hyradix.device_bytes import ladder, prefill_ladder
from hyradix.engine.build import build_engine
from hyradix.engine.demo import demo_directory
from hyradix.kernels import triton_support
from hyradix.runner.device_rehearsal import rehearse
from hyradix.runner.device_runner import DeviceRunner
from hyradix.runner.runner import ModelRunner
from tests.runner.device.served import SIZES, World, arrival, compare, poison_all, serve, tokens
from tests.support.interpreter import mend_bfloat16

pytestmark = [
    pytest.mark.slow,
    # warm-up computes on memory that nobody has written
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide|All-NaN):RuntimeWarning"),
]
TRAFFIC = (arrival(0, tokens(11, 1), max_tokens=6), arrival(1, tokens(5, 2), max_tokens=7))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture
def checkpoint(world: World) -> Path:
    """The world's model as a directory that anybody could serve."""
    directory = world.directory
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    weights = {
        name if name in names or name.startswith("model.") else f"model.{name}": x.contiguous()
        for name, x in world.weights().items()
    }
    save_file(weights, directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_directory() / name, directory)
    return directory


def test_an_engine_is_built_on_the_asynchronous_runner(world: World, checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = {**SIZES, "model": str(checkpoint), "device": "cpu", "dtype": "float32"}
    settings = Settings(**options, decode_log=4, overlap=True)
    engine = build_engine(settings, lambda *news: told.append(news), backend="triton")
    assert isinstance(engine.runner, DeviceRunner)
    assert engine.runner.measure_peak() == 0
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["weights", "kernels", "graphs"]
    sizes = len(ladder(3)) + len(prefill_ladder(16))
    assert [news for news in told if news[0] == "graphs"] == [
        ("graphs", done, sizes) for done in range(sizes + 1)
    ]
    compare(serve(engine, TRAFFIC), serve(world.twin(), TRAFFIC))


def test_steps_whose_kernels_are_only_compiled_need_no_result_of_theirs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``compile_ahead`` runs, on NaN and the largest integers: indices are the host's."""
    model = world.model("triton")
    engine = world.engine(model, DeviceRunner, decode_log=4, overlap=True)
    poison_all(engine.runner, engine.scheduler.config)
    left_out = []
    monkeypatch.setattr(triton_support, "start", lambda kernel, *_: left_out.append(kernel))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.inference_mode():
            rehearse(engine.runner, lambda *_: None, is_device=True)
            engine.runner.launcher.rehearse_moves()
            engine.runner.launcher.rehearse_padded()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({kernel.__name__ for kernel in left_out}) > 5
    monkeypatch.undo()
    engine.runner.warm_up(lambda *_: None)
    poison_all(engine.runner, engine.scheduler.config)
    compare(serve(engine, TRAFFIC), serve(world.twin(), TRAFFIC))


def test_drafts_take_the_synchronous_runner_on_the_same_kernels(checkpoint: Path) -> None:
    options = {**SIZES, "model": str(checkpoint), "device": "cpu", "dtype": "float32"}
    settings = Settings(**options, spec="ngram", spec_steps=2, spec_state="log")
    engine = build_engine(settings, lambda *_: None, backend="triton")
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.pools.kv.k.device.type == "cpu"


def test_bfloat16_steps_are_the_synchronous_runners(world: World, device: torch.device) -> None:
    """The same kernels on the same types: pools and windows of activations, float32 states."""
    if device.type == "cpu":
        mend_bfloat16()
    model = world.model("triton", str(device), "bfloat16")
    options = {"decode_log": 4, "overlap": True}
    engine = world.engine(model, DeviceRunner, **options)
    poison_all(engine.runner, engine.scheduler.config)
    pools = engine.runner.pools
    assert pools.kv.k.dtype == pools.states.conv.dtype == torch.bfloat16
    assert pools.states.recurrent.dtype == torch.float32
    twin = world.engine(model, ModelRunner, **{**options, "overlap": False})
    compare(serve(engine, TRAFFIC), serve(twin, TRAFFIC))

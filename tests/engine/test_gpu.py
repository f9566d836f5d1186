"""The choice of the device, what a GPU is refused for, and how its memory is divided."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyradix.config import DeviceFacts, Settings, resolve
from hyradix.engine.build import build_engine
from hyradix.engine.device import device_facts
from hyradix.engine.gpu import Cuda, refusal
from hyradix.engine.memory_plan import GpuOptions, PlanOptions, make_plan
from hyradix.errors import ConfigError
from hyradix.models.loader import model_facts
from hyradix.models.registry import find_family
from hyradix.server.cli import app
from tests.runner.device.served import CONFIG

GIB = 1 << 30


@dataclass
class FakeDriver:
    built: bool = True
    device: bool = True
    triton: bool = True
    compute: tuple[int, int] = (9, 0)
    free: int = 139 * GIB
    total: int = 140 * GIB

    def is_built(self) -> bool:
        return self.built

    def has_device(self) -> bool:
        return self.device

    def has_triton(self) -> bool:
        return self.triton

    def capability(self) -> tuple[int, int]:
        return self.compute

    def name(self) -> str:
        return "Fake 9000"

    def memory(self) -> tuple[int, int]:
        return self.free, self.total


REFUSED = [
    (FakeDriver(built=False), "built without CUDA: install a CUDA build of torch"),
    (FakeDriver(device=False), "sees no CUDA device"),
    (FakeDriver(compute=(7, 5)), "Fake 9000 has compute capability 7.5; the kernels need 8.0"),
    (FakeDriver(triton=False), "Triton, which is not installed: pip install triton"),
]


@pytest.mark.parametrize(("driver", "reason"), REFUSED)
def test_what_is_missing_is_said_and_auto_takes_the_cpu(driver: FakeDriver, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        device_facts("cuda", memory_fraction=0.9, driver=driver)
    assert error.value.param == "device"
    assert "--device cpu" in str(error.value)
    assert device_facts("auto", memory_fraction=0.9, driver=driver).kind == "cpu"


def test_auto_takes_a_gpu_that_will_do() -> None:
    facts = device_facts("auto", memory_fraction=0.9, driver=FakeDriver())
    assert (facts.kind, facts.name, facts.total_bytes) == ("cuda", "Fake 9000", 140 * GIB)
    assert facts.free_bytes == int(140 * GIB * 0.9) - GIB
    assert device_facts("cpu", memory_fraction=0.9, driver=FakeDriver()).kind == "cpu"


def test_a_gpu_that_others_fill_is_refused() -> None:
    driver = FakeDriver(free=10 * GIB)
    with pytest.raises(ConfigError, match="133120 of 143360 MiB are in use already"):
        device_facts("cuda", memory_fraction=0.9, driver=driver)


def test_the_engine_refuses_a_gpu_that_is_not_there() -> None:
    if refusal(Cuda()) is None:
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="--device cuda: "):
        build_engine(Settings(device="cuda"), lambda *_: None)


# ---- what is decided for a GPU -----------------------------------------------------------------


def facts(kind: str = "cuda", dtype: str = "bfloat16"):
    config = find_family(CONFIG).parse_config(CONFIG, {})
    return model_facts(config, dtype, device=kind, name="tiny")


def gpu(free: int = 100 * GIB, peak: int | None = None) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda", free_bytes=free, name="Fake 9000", total_bytes=140 * GIB, peak_bytes=peak
    )


def test_defaults_on_a_gpu() -> None:
    config = resolve(Settings(), facts(), gpu())
    assert (config.dtype, config.overlap, config.num_log_rows) == ("bfloat16", True, 16)
    assert (config.max_requests, config.max_prefill_tokens) == (256, 8192)
    on_cpu = resolve(Settings(), facts("cpu"), DeviceFacts(kind="cpu", free_bytes=GIB))
    assert (on_cpu.dtype, on_cpu.overlap, on_cpu.num_log_rows) == ("float32", False, 0)
    drafting = resolve(Settings(spec="ngram"), facts(), gpu())
    assert not drafting.overlap
    assert not resolve(Settings(overlap=False), facts(), gpu()).overlap


def test_windows_and_kv_are_activations_and_states_are_float32() -> None:
    narrow, wide = facts(), facts(dtype="float32")
    assert 2 * narrow.kv_bytes_per_slot == wide.kv_bytes_per_slot
    states = 4 * 2 * 16 * 16
    assert wide.state_bytes_per_slot - states == 2 * (narrow.state_bytes_per_slot - states)


def test_all_of_the_memory_is_planned() -> None:
    config = resolve(Settings(), facts(), gpu(10 * GIB, peak=GIB))
    used = config.kv_pool_bytes + config.state_pool_bytes + config.draft_bytes
    assert 7 * GIB < used < 9 * GIB
    less = resolve(Settings(), facts(), gpu(10 * GIB, peak=2 * GIB))
    assert used - (less.kv_pool_bytes + less.state_pool_bytes + less.draft_bytes) == pytest.approx(
        1.1 * GIB, rel=1e-3
    )


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"MiB of weights and \d+ MiB to compute do not fit"):
        resolve(Settings(), facts(), gpu(GIB // 2))
    with pytest.raises(ConfigError, match=r"do not fit into the 512 MiB .* of Fake 9000 \(143360"):
        resolve(Settings(), facts(), gpu(GIB // 2, peak=GIB))
    with pytest.raises(ConfigError, match=r"1 MiB do not hold 256 working states .* MiB of logs"):
        resolve(Settings(memory_bytes=1 << 20), facts(), gpu())


def test_one_request_and_chunks_under_the_least_captured_size() -> None:
    config = resolve(Settings(max_requests=1, max_prefill_tokens=8), facts(), gpu())
    assert (config.max_requests, config.max_prefill_tokens) == (1, 8)


def test_an_unlimited_prefill_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="nearest valid choice is --max-prefill-tokens 8192"):
        resolve(Settings(max_prefill_tokens=0), facts(), gpu())
    with pytest.raises(ConfigError, match="--memory-fraction must be between"):
        resolve(Settings(memory_fraction=1.5), facts(), gpu())


@pytest.mark.parametrize("requests", [8, 256])
def test_the_plan_says_what_start_up_will_divide(requests: int) -> None:
    plan = make_plan(
        CONFIG,
        PlanOptions(
            budget=140 * GIB,
            num_requests=requests,
            decode_log=16,
            gpu=GpuOptions(),
            max_context=100,
        ),
    )
    (row,) = plan.rows
    free = int(140 * GIB * Settings().memory_fraction)
    settings = Settings(max_requests=requests, max_context=100)
    config = resolve(settings, facts(), gpu(free))
    assert row.num_kv_slots == config.num_kv_slots
    assert row.num_states == config.num_states - requests


def test_the_command_plans_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    options = ("--budget", "80G", "--requests", "4")

    def planned(*more: str) -> dict[str, int]:
        out = tmp_path / "plan.json"
        result = CliRunner().invoke(app, ["memory", str(path), *options, *more, "--json", str(out)])
        assert result.exit_code == 0, result.output
        assert ("GPU: " in result.output) is ("cuda" in more)
        return json.loads(out.read_text())["modes"]["plain"]

    whole = planned("--decode-log", "16", "--dtype", "bfloat16")
    gpu = planned("--device", "cuda", "--memory-fraction", "0.5")
    assert 0.4 * whole["kv_slots"] < gpu["kv_slots"] < 0.5 * whole["kv_slots"]
    assert gpu["peak_bytes"] == whole["peak_bytes"]

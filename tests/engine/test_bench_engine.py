"""``hyradix bench engine`` from the inside: figures of a tiny model, floors, stages, parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hyradix.config import Settings
from hyradix.engine.bench.commands import EngineBenchOptions, run_engine
from hyradix.engine.bench.engine import DeviceClock, Driver, Run, Step, decode_case, medians
from hyradix.engine.bench.floors import Floors, known_figures
from hyradix.engine.bench.plot import plot_engine
from hyradix.engine.bench.start import Stages, process_age_s
from hyradix.engine.step_times import StepTimes
from hyradix.errors import ConfigError
from hyradix.models.loader import load_config
from tests.support.real_server import ROOT

CONFIGS = ROOT / "benchmarks/configs"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    raw = json.loads((CONFIGS / "cpu25m.json").read_text())
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(raw | {"num_hidden_layers": 4, "hidden_size": 96}))
    return Settings(random_weights=str(path), num_threads=1)


def test_a_report_and_its_plot(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineBenchOptions(
        batches=(1, 3), prompt=9, output=8, prefill=(2, 40), cached=(90, 70), repeats=2
    )
    report = run_engine(settings, options, ["bench", "engine", "--json", "x", "--batch", "1", "3"])
    assert report["command"] == "hyradix bench engine --batch 1 3"
    assert [row["batch"] for row in report["decode"]] == [1, 3]
    for row in report["decode"]:
        parts = sum(row[f"{x}_ms"] for x in ("schedule", "submit", "wait", "commit", "other"))
        assert parts == pytest.approx(row["ms_per_step"], rel=0.6)  # medians, each of its own
        assert row["submit_ms"] > 0.2 * row["ms_per_step"]
        assert row["floor_ms"] > 0
        assert row["device_ms"] is None
        assert len(row["rounds_ms"]) == 2
    assert report["cached"]["cached_tokens"] == 70
    assert report["prefill"]["tokens_per_s"] > 0
    assert set(report["start"]["None"]["stages_s"]) >= {"config", "weights", "kernels"}
    printed = capsys.readouterr().out
    assert "prefill 2 x 40" in printed
    assert "with 70 cached" in printed
    plot_engine(report | {"decode": [x | {"peer_ms": 1.0} for x in report["decode"]]},
                tmp_path / "plot.png")  # fmt: skip
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": ()}, "nothing is asked for"),
        ({"batches": (1,), "cached": (50, 50)}, "must be shorter"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineBenchOptions(prompt=9, output=8, **options).check()  # type: ignore[arg-type]


def test_pools_have_room_for_every_case() -> None:
    options = EngineBenchOptions(
        batches=(1, 4), prompt=10, output=6, prefill=(2, 30), cached=(100, 50)
    )
    sized = options.pools(Settings())
    assert (sized.max_requests, sized.max_context) == (4, 102)
    assert sized.kv_slots >= 2 * 101
    assert sized.states >= 4
    assert options.pools(Settings(states=5)).states == 5


def test_a_reply_that_ends_too_soon_is_said_so(settings: Settings) -> None:
    options = EngineBenchOptions(batches=(3,), prompt=64, output=4, repeats=1)
    small = EngineBenchOptions(batches=(3,), prompt=64, output=4).pools(settings)
    driver = Driver(Settings.from_options(
        random_weights=small.random_weights, num_threads=1, max_prefill_tokens=8, max_context=80,
        max_requests=3, kv_slots=400, states=8,
    ))  # fmt: skip
    with pytest.raises(ConfigError, match="ends before all 3 prompts"):
        decode_case(driver, options, 3)


def test_full_steps_follow_full_steps() -> None:
    def step(requests: int) -> Step:
        return Step(1.0, {}, requests, requests, 0.0)

    run = Run([step(n) for n in (1, 2, 2, 2, 1)], [])
    assert len(run.full_steps(2)) == 2
    assert medians([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}]) == {"a": 2.0, "b": None}


class FakeEvent:
    """An event of a device that is as slow as its clock says."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: None) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_device_time_is_that_of_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop that schedules nothing has none."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = DeviceClock(None)
    for part, at in (("schedule", 1.0), ("submit", 4.0), ("schedule", 9.0), ("wait", 9.5),
                     ("schedule", 10.0), ("submit", 12.0), ("commit", 13.0)):  # fmt: skip
        FakeEvent.now = at
        clock(part)  # type: ignore[arg-type]
    assert clock.take() == [3.0, 2.0]
    assert clock.take() == []


def test_floors_are_those_of_the_table() -> None:
    """PERFORMANCE.md section 4: 4.39 TB/s, 48 MiB of state, in place and with 16 rows."""
    config = load_config(CONFIGS / "shape-4b.json")
    floors = Floors(config, 2, 48 << 20, 32 << 10)
    table = {(1, 0): 1.84, (8, 0): 2.06, (64, 0): 3.86, (256, 0): 10.0, (1, 16): 1.83,
             (64, 16): 3.15, (256, 16): 7.2}  # fmt: skip
    for (batch, log), expected in table.items():
        floor = floors.decode_bytes(batch, 1152, log) / 4.39e12 * 1e3
        assert floor == pytest.approx(expected, rel=0.03), (batch, log)
    assert floors.prefill_operations(65_536, 8) == pytest.approx(65_536 * 2 * 3.57e9, rel=0.01)
    known = known_figures(config, "cuda")
    assert known is not None
    assert known.target_ms[64] == 5.8
    assert known_figures(config, "cpu") is None
    assert known_figures(load_config(CONFIGS / "cpu25m.json"), "cuda") is None


def test_experts_are_read_as_often_as_they_are_chosen() -> None:
    config = load_config(CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json")
    floors = Floors(config, 1, 0, 0)
    one, many = (floors.decode_bytes(n, 0, 0) for n in (1, 4096))
    assert 3e9 < one < 4.2e9
    assert 78e9 < many < 81e9


def test_stages_last_until_the_next() -> None:
    now = [0.0]
    stages = Stages(lambda: now[0])
    for stage, at in (("weights", 1.0), ("weights", 2.0), ("kernels", 4.0), ("weights", 5.0)):
        now[0] = at
        stages.update(stage, 1, 1)
    now[0] = 7.0
    stages.finish()
    expected = {"config": 1.0, "weights": 5.0, "kernels": 1.0}
    assert stages.as_json() == {"stages_s": expected, "ready_s": 7.0}
    assert (process_age_s() or 0.0) >= 0.0


def test_parts_of_a_step_add_up() -> None:
    now = [10.0]
    times = StepTimes(lambda: now[0])
    seen = []
    times.observer = seen.append
    for _ in range(2):
        times.begin()
        for part, seconds in (("schedule", 1.0), ("submit", 2.0), ("commit", 4.0)):
            now[0] += seconds
            times.end(part)
    assert times.seconds == {"schedule": 1.0, "submit": 2.0, "commit": 4.0}
    assert times.total_s == 7.0
    assert seen == ["schedule", "submit", "commit"] * 2

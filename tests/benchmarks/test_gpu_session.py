"""The session on one GPU: its stages, its limits, what it keeps, how results are read."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_session, gpu_stages
from benchmarks.gpu_memcheck import read as read_memcheck
from benchmarks.gpu_session import Session, main, run_stage, table
from benchmarks.gpu_stages import Place, Stage, _memcheck, _pytest, ncu, stages

NAMES = [
    "kernel_checks", "o1_float32", "start", "decode", "prefill", "memory", "kernel_times",
    "kernel_tests", "families", "conformance", "o1_families", "o1_bfloat16", "http", "ncu_1",
    "ncu_2", "ncu_3", "sanitizer",
]  # fmt: skip


@pytest.mark.parametrize(("device", "is_tiny"), [("cuda", False), ("cuda", True), ("cpu", True)])
def test_stages_are_commands_or_say_why_not(
    device: str, is_tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stages.shutil, "which", lambda tool: f"/bin/{tool}")
    found = stages(Place(device, is_tiny, tmp_path, tmp_path))
    assert [stage.name for stage in found] == NAMES
    for stage in found:
        assert (stage.command is None) == bool(stage.skipped)
    commands = {stage.name: " ".join(stage.command or []) for stage in found}
    assert ("shape-4b" in commands["decode"]) == (not is_tiny)
    assert ("--dtype bfloat16" in commands["decode"]) == (device == "cuda")
    if device == "cuda":
        assert commands["ncu_1"].startswith("/bin/ncu --clock-control none --profile-from-start")
        assert "-m gpu " in commands["families"]
        assert commands["families"].endswith("tests/gpu")
        assert sum(stage.limit_s for stage in found) < 3600


def code(text: str, **fields: object) -> Stage:
    return Stage("some", 20.0, [sys.executable, "-c", text], **fields)  # type: ignore[arg-type]


def test_a_stage_that_works_fails_hangs_or_brings_nonsense() -> None:
    entry, output = run_stage(code("print('3 passed in 1s')", read=_pytest), 20.0)
    assert (entry["status"], entry["figures"]) == ("ok", {"passed": 3})
    assert output == "3 passed in 1s\n"
    assert run_stage(code("raise SystemExit(7)"), 20.0)[0]["status"] == "failed (7)"
    entry, output = run_stage(code("import time; print('begun', flush=True); time.sleep(60)"), 1.5)
    assert entry["status"].startswith("over its limit of 2")
    assert output == "begun\n"
    entry, _ = run_stage(code("", read=lambda _: json.loads("nonsense")), 20.0)
    assert entry["status"] == "its result cannot be read"


def test_a_session_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(place: Place) -> list[Stage]:
        report = place.scratch / "good.json"
        write = f"open({str(report)!r}, 'w').write('[1]')"
        return [
            Stage("good", 20.0, [sys.executable, "-c", write], read=lambda _: {"x": 1}),
            Stage("bad", 20.0, [sys.executable, "-c", "print('oh'); raise SystemExit(3)"]),
            Stage("none", 0, skipped="no reason"),
        ]

    monkeypatch.setattr(gpu_session, "stages", few)
    out = tmp_path / "out"
    assert main(["--out", str(out)]) == 1
    kept = json.loads((out / "session.json").read_text())
    assert kept["stages"]["good"]["report"] == [1]
    assert kept["stages"]["none"]["status"] == "skipped: no reason"
    assert "===== bad: failed (3) =====\noh" in (out / "session.log").read_text()
    capsys.readouterr()
    assert main(["--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("good") == 1  # in the table alone: it was not run again
    assert printed.count("bad") == 2
    assert main(["--out", str(out), "--budget", "1", "--stages", "bad"]) == 0
    assert Session(Place("cpu", True, tmp_path, out)).entries["bad"]["status"].endswith("over")
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--stages", "unheard"])
    assert len(list(out.iterdir())) == 2


def test_outputs_of_tools_are_read() -> None:
    assert _pytest("x\n==== 2 failed, 31 passed, 4 skipped in 12.1s ====") == {
        "failed": 2, "passed": 31, "skipped": 4,
    }  # fmt: skip
    clean = read_memcheck(
        "t.py::a PASSED [50%]\nt.py::b PASSED [100%]\n= ERROR SUMMARY: 0 errors", 0
    )
    bad = read_memcheck("t.py::c FAILED [100%]\n= ERROR SUMMARY: 3 errors\nFAILED t.py::c - no", 9)
    assert (clean["passed"], clean["failed"], clean["errors"]) == (2, 0, 0)
    assert (bad["passed"], bad["failed"], bad["errors"]) == (0, 1, 3)
    died = read_memcheck("no device", -11)
    assert died["errors"] is None
    assert _memcheck({"files": {"a": clean, "b": bad, "c": died}}) == {
        "passed": 2, "failed": 1, "errors": 3, "not ended": ["c"],
    }  # fmt: skip
    header = (
        '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value",'
        '"Rule Name","Rule Type","Rule Description"'
    )
    rows = [
        '"0","_step","GPU Speed Of Light","DRAM Throughput","%","81.5","","",""',
        '"0","_step","GPU Speed Of Light","Duration","us","9.9","","",""',
        '"0","_step","SpeedOfLight","","","","SOLBottleneck","INF","Memory is more utilized"',
        '"1","_step","GPU Speed Of Light","Duration","us","10.1","","",""',
    ]
    found = ncu("\n".join(["==PROF== connected", header, *rows, "a bench, 64: 9 bytes"]))
    assert found == {
        "kernels": {
            "_step": {
                "dram_percent %": "81.5",
                "duration us": "10.1",
                "limits": {"SOLBottleneck": "Memory is more utilized"},
            }
        }
    }
    assert "error" in ncu("nothing")


def test_the_table_names_every_stage() -> None:
    entries = {"one": {"seconds": 1.0, "status": "ok", "figures": {"a": 1}}}
    assert table(entries).splitlines()[1] == 'one                1.0  ok {"a": 1}'


def test_the_profiled_benches_exist() -> None:
    pytest.importorskip("triton")
    for section, name, batch in gpu_stages.HOTTEST:
        module = importlib.import_module(f"benchmarks.gpu.{section}")
        benches = module.benches(torch.device("meta"), tune=False)
        assert any((x.name, x.batch) == (name, batch) for x in benches), name

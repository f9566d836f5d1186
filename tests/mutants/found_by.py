"""A pytest plugin for ``run.py``: stops at the first failure that counts, and says who found it.

A failed assertion, a wrong output or a run that never ends counts. An exception that a fault merely
trips over (TypeError, AttributeError, KeyError, ...) does not: the run goes on, in search of
something that understood what was wrong. The verdict is written to ``$HYRADIX_VERDICT`` as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True)
settings.load_profile("mutants")

ORACLES = {
    ("drive.py", "expect"): "O1",
    ("harness.py", "verify"): "O1",
    ("harness.py", "run"): "O3 (never ends)",
    ("invariants.py", "check_idle"): "O2",
}
FILES = {
    "invariants.py": "check()",
    "fake_runner.py": "fake runner",
    "fake_states.py": "fake runner",
    "slot_watch.py": "harness",
    "drive.py": "harness",
    "harness.py": "harness",
}
VERDICT: dict[str, str] = {}


def _oracle(trace: list[tuple[str, str]]) -> str:
    """Who raised: from the innermost frame outwards, the first that has a name."""
    for path, function in reversed(trace):
        name = Path(path).name
        if "hyradix" in Path(path).parts and name != "invariants.py":
            return f"assertion in {name}"
        found = ORACLES.get((name, function)) or FILES.get(name)
        if found:
            return found
        if "tests" in Path(path).parts:
            return "specific assertion"
    return "?"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> object:
    outcome = yield
    if call.excinfo is None or not outcome.get_result().failed:
        return
    error = call.excinfo.value
    text = str(error).strip().splitlines() or [str(call.excinfo.traceback[-1].statement).strip()]
    trace = [(str(entry.path), entry.name) for entry in call.excinfo.traceback]
    if call.excinfo.errisinstance(pytest.fail.Exception):
        is_timeout = "Timeout" in text[0]
        kind = "O3 (never ends)" if is_timeout else "specific assertion"
    elif call.excinfo.errisinstance(AssertionError):
        kind = _oracle(trace)
    else:
        VERDICT.setdefault("tripped", f"{call.excinfo.typename} in {item.nodeid}")
        return
    if "test" not in VERDICT:
        VERDICT.update(test=item.nodeid, oracle=kind, message=text[0])
        item.session.shouldstop = "found"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        VERDICT["broken"] = str(report.longrepr)[-300:]


def pytest_sessionfinish() -> None:
    Path(os.environ["HYRADIX_VERDICT"]).write_text(json.dumps(VERDICT))

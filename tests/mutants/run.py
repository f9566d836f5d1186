"""Plants one fault at a time and says which test finds it, and by which oracle.

    python tests/mutants/run.py [--only WORDS] [--out benchmarks/results/mutants.md]

The source and the tests are copied; the working tree is never touched. Per fault the suite below
runs up to the first failure that counts (``found_by.py``). Exit status 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.faults import Fault, load  # noqa: E402  (run as a script: the root first)

SUITE = [
    "tests/scheduler/test_schedules.py::test_seeded_schedules[0]",
    "tests/scheduler/test_drafts.py",
    "tests/scheduler/test_schedules.py::test_seeded_schedules[40]",
    "tests/conformance/test_c08_preemption.py",
    "tests/conformance/test_c16_small_pools.py",
    "tests/conformance/test_c19_namespaces.py",
    "tests/conformance/test_regressions.py",
    "tests/scheduler/test_faulty_rows.py",
    "tests/scheduler/test_overlap.py",
    "tests/scheduler/test_prefill_budget.py",
    "tests/cache/test_fates.py",
    "tests/cache/test_policy.py",
    "tests/cache/test_state_slots.py",
    "tests/conformance",
    "tests/cache",
]
PYTEST = ["-q", "-m", "not long", "--timeout=300", "-p", "no:cacheprovider"]
PLUGIN = ["-p", "tests.mutants.found_by"]


def copy(root: Path) -> None:
    """What the suite needs, without the model that the package carries."""
    ignore = shutil.ignore_patterns("__pycache__", "demo_model", ".hypothesis")
    shutil.copytree(ROOT / "src", root / "src", ignore=ignore)
    shutil.copytree(ROOT / "tests", root / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", root)


def run(root: Path) -> dict[str, str]:
    """The verdict of the suite on the tree under ``root``."""
    verdict = root / "verdict.json"
    verdict.unlink(missing_ok=True)
    packages = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(packages), "HYRADIX_VERDICT": str(verdict)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *PYTEST, *PLUGIN, *SUITE],
        cwd=root,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        return {"killed": f"signal {-done.returncode}"}
    if not verdict.exists():
        return {"broken": (done.stdout + done.stderr)[-300:]}
    return {**json.loads(verdict.read_text()), "seconds": f"{time.monotonic() - started:.0f}"}


def try_fault(fault: Fault, roots: SimpleQueue[Path]) -> dict[str, str]:
    """The verdict on one fault, planted in a tree that nobody else is using."""
    root = roots.get()
    try:
        with fault.planted(root):
            verdict = run(root)
            if "killed" in verdict:  # by somebody else: that says nothing about the fault
                verdict = run(root)
        return verdict
    finally:
        roots.put(root)


def row(number: int, fault: Fault, verdict: dict[str, str]) -> str:
    """One line of the table."""
    test = verdict.get("test", "")
    if test:
        file, _, name = test.partition("::")
        by = f"`{Path(file).name}::{name}`"
        what = verdict["oracle"] + (f": {verdict['message']}" if verdict["message"] else "")
    else:
        by = "SURVIVES"
        what = verdict.get("tripped") or verdict.get("broken") or verdict.get("killed")
        what = what or "nothing failed"
    what = what.replace("|", "\\|").replace("\n", " ")[:110]
    return f"| {number} | {fault.name} | {fault.place} | {by} | {what} |"


def current_commit() -> str:
    """The commit that is tested; marked where the working tree differs from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def heading(command: str, commit: str, num_found: int, num_faults: int) -> list[str]:
    """Where the table comes from."""
    today = datetime.datetime.now(datetime.UTC).date()
    return [
        "# Planted faults and who finds them",
        "",
        f"Command: `{command}`  ",
        f"Commit: {commit} · {today} · Python {platform.python_version()}  ",
        f"Found: {num_found} of {num_faults}. A fault counts as found by a failed assertion, a",
        "wrong output or a run that never ends, not by an exception that it trips over.",
        "",
        "O1: the output differs from a cold run's. O2: at rest free + owned by the tree = total.",
        "O3: the scheduler never ends or nothing can be scheduled. check(): an invariant of",
        "`cache/invariants.py`. Fake runner, harness: what `tests/support` asserts of every step.",
        "",
        "| # | fault | DESIGN | found by (first) | oracle |",
        "|---|---|---|---|---|",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name or place contains this")
    parser.add_argument("--start", type=int, default=1, help="number of the first fault tried")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--workers", type=int, default=1, help="faults planted at a time")
    options = parser.parse_args()
    numbered = [
        (number, fault)
        for number, fault in enumerate(load(), 1)
        if number >= options.start and options.only in f"{fault.place}: {fault.name}"
    ]
    faults = [fault for _, fault in numbered]
    rows, num_found, commit = [], 0, current_commit()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            copy(Path(folder) / str(number))
            roots.put(Path(folder) / str(number))
        if options.out:
            sound = run(Path(folder) / "0")
            assert "test" not in sound, f"the suite fails without a fault: {sound}"
        verdicts = pool.map(lambda fault: try_fault(fault, roots), faults)
        for (number, fault), verdict in zip(numbered, verdicts, strict=True):
            num_found += "test" in verdict
            rows.append(row(number, fault, verdict))
            print(rows[-1], f"{verdict.get('seconds', '?')} s", flush=True)
    command = "python " + " ".join(["tests/mutants/run.py", *sys.argv[1:]])
    table = [*heading(command, commit, num_found, len(faults)), *rows]
    print(f"found: {num_found} of {len(faults)}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(table) + "\n")
    return 0 if num_found == len(faults) else 1


if __name__ == "__main__":
    raise SystemExit(main())

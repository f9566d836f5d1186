"""Kernel tests under compute-sanitizer's memcheck, one process a file, side by side.

    python benchmarks/gpu_memcheck.py --json OUT.json [--limit 200] [--files test_prefill.py ...]

One sanitizer over one process of tests each: over a pool of them (xdist) the tool itself died. A
file that ends badly or runs out of time leaves the others alone. Run the tests once without it
before, so that no kernel is compiled under it. Exits with 1 where an access was bad, a test failed
or a file did not end.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.figures import FRAME  # noqa: E402
from benchmarks.gpu_session import run_limited  # noqa: E402
from benchmarks.gpu_stages import Stage, environment  # noqa: E402

FOLDER = "tests/kernels/triton_kernels"
LEFT_OUT = ("test_large_pools.py",)
"""Pools of more than 2^31 elements, each watched byte by byte."""
NO_TESTS = 5
"""What pytest ends with where a file has no test of a device."""
MAX_SHOWN = 4000
"""Characters of the end of what a file printed that are shown."""


def check(tool: str, file: str, limit_s: float) -> dict[str, Any]:
    """What became of one file."""
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    command += ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu", f"{FOLDER}/{file}"]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or it sees one large block
    stage = Stage(file, limit_s, command, environment=uncached)
    started = time.monotonic()
    code, output = run_limited(command, environment(stage), limit_s)
    return {"seconds": round(time.monotonic() - started, 1), **read(output, code)}


def read(output: str, code: int | None) -> dict[str, Any]:
    """Of what a file printed: tests that passed and failed, bad accesses (None: it did not say)."""
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    if code == NO_TESTS and not errors:
        errors = ["0"]
    return {
        "code": code,
        "passed": len(re.findall(r" PASSED\b", output)),
        "failed": len(re.findall(r" FAILED\b.*%\]", output)),
        "errors": sum(map(int, errors)) if errors else None,
        "end": output[-MAX_SHOWN:],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a file")
    parser.add_argument("--files", nargs="*", help="default: all but those of large pools")
    args = parser.parse_args(arguments)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        parser.error("compute-sanitizer is not on the PATH")
    every = sorted(path.name for path in (ROOT / FOLDER).glob("test_*.py"))
    names = args.files or [name for name in every if name not in LEFT_OUT]
    with ThreadPoolExecutor(len(names)) as pool:
        found = pool.map(lambda file: check(tool, file, args.limit), names)
        files = dict(zip(names, found, strict=True))
    is_clean = True
    for name, entry in files.items():
        end = entry.pop("end")
        is_good = entry["code"] in (0, NO_TESTS) and entry["errors"] == 0 and not entry["failed"]
        is_clean = is_clean and is_good
        print(name, json.dumps(entry), *([] if is_good else [end]), sep="\n", flush=True)
    args.json.write_text(json.dumps({**FRAME, "files": files}, indent=1) + "\n")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

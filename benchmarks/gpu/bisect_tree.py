"""Which launch of a layer breaks: every kernel by itself, every configuration in its own process.

    PYTHONPATH=src python benchmarks/gpu/bisect_tree.py [--match TEXT]

Needs a GPU, under a minute of it. A process builds one case of ``CASES``, waits after each launch
and compares nothing: it says which kernel ended in an error, or that all ran. What was seen: trees
of 64 nodes ended in an illegal memory access with 8 warps; interpreted, no access leaves its
tensor, and no shared address of the compiled kernel (PTX) leaves its allocation. What is suspected:
warp group products of small tiles, which trees of up to 32 nodes do not use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.gpu import attention, prefill, recurrent  # noqa: E402
from benchmarks.gpu.bench import Bench  # noqa: E402
from hyradix.kernels.triton_table import ChunkConfig, VerifyConfig  # noqa: E402

NODES = (8, 16, 32, 48, 63, 64)
VERIFY = (
    VerifyConfig(16, 1, 16), VerifyConfig(16, 2, 16), VerifyConfig(32, 4, 16),
    VerifyConfig(32, 4, 32), VerifyConfig(32, 8, 16), VerifyConfig(32, 8, 32),
    VerifyConfig(32, 8, 32, 1),
)  # fmt: skip
CHUNK = (ChunkConfig(32, 4, 4, 2), ChunkConfig(32, 4, 4), ChunkConfig(16, 2, 2))


def cases(device: torch.device) -> dict[str, Callable[[], Bench]]:
    """By name; a bench is built in the process that runs it."""
    found: dict[str, Callable[[], Bench]] = {}
    for nodes in NODES:
        for config in VERIFY:
            for batch in (1, 64):
                found[f"tree of {nodes}, batch {batch}, {config}"] = (
                    lambda n=nodes, b=batch, c=config: recurrent.bench_trees(b, n, c, device)
                )
    for chunk in CHUNK:
        found[f"prefill, {chunk}"] = lambda c=chunk: prefill.bench([512, 70], c, device)
    found["attention of a tree of 64"] = lambda: next(
        x for x in attention.benches(device, tune=False) if x.name.endswith("tree of 64")
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _one(options.one)
    names = [x for x in cases(torch.device("cuda")) if options.match in x and "batch 1," not in x]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as pool:
        failed = sum(pool.map(_in_process, names))
    print(f"{len(names)} processes, {failed} failed")
    return 1 if failed else 0


def _in_process(name: str) -> bool:
    """Whether a case failed; prints what it said. A batch of 1 comes before one of 64."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        said = [line for line in done.stdout.splitlines() if line.startswith("-- ")]
        status = done.returncode
    except subprocess.TimeoutExpired:
        said, status = ["-- ran out of time"], 1
    if not said:
        said = ["-- broke off: " + done.stderr.strip().splitlines()[-1][:150]]
    print(
        f"{'FAILED' if status else 'ok    '} {name}: {'; '.join(x[3:] for x in said)}", flush=True
    )
    return status != 0


def _one(name: str) -> int:
    made = cases(torch.device("cuda"))
    for case in dict.fromkeys((name.replace("batch 64", "batch 1"), name)):
        try:
            with mock.patch.object(JITFunction, "run", _waiting(JITFunction.run)):
                made[case]().build(1)[0]()
        except RuntimeError as error:
            print(f"-- {case}: {str(error).splitlines()[0][:150]}")
            return 1
    print("-- all launches ran")
    return 0


def _waiting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Launches that are waited for; an error names its kernel."""

    def waiting(self: Any, *args: Any, **options: Any) -> Any:
        try:
            result = run(self, *args, **options)
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{self.__name__}: {error}") from error
        return result

    return waiting


if __name__ == "__main__":
    sys.exit(main())

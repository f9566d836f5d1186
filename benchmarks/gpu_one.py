"""One bench of ``benchmarks/gpu`` alone, for a profiler: everything it reads is made before.

    ncu --profile-from-start off ... python benchmarks/gpu_one.py SECTION NAME BATCH [CALLS]

The calls between ``cudaProfilerStart`` and ``-Stop`` are on inputs of their own, after one that
compiles.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402


def main(section: str, name: str, batch: str, calls: str = "3") -> int:
    benches = import_module(f"benchmarks.gpu.{section}").benches(torch.device("cuda"), tune=False)
    for bench in benches:
        if bench.name == name and bench.batch == int(batch):
            first, *rest = bench.build(1 + int(calls))
            first()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            for call in rest:
                call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(f"{bench.name}, {bench.batch}: {bench.num_bytes} bytes a call")
            return 0
    print(f"section {section} has no bench {name!r} at {batch}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Every Triton kernel on one GPU: ``hyradix bench kernels``; and compiled for one that is not here.

    PYTHONPATH=src python benchmarks/gpu_kernels.py [OPTIONS OF hyradix bench kernels]
    PYTHONPATH=src python benchmarks/gpu_kernels.py --compile-only [--tune] [SECTION ...]

``--compile-only`` needs no device: it compiles for sm_90 and prints registers, spills and shared
memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

GPU = ROOT / "benchmarks/gpu"


def main(arguments: list[str]) -> int:
    if "--compile-only" in arguments:
        wanted = [x for x in arguments if not x.startswith("-")]
        return compile_only(wanted, tune="--tune" in arguments)
    from hyradix.server import cli

    arguments = ["--time-only" if x == "--no-check" else x for x in arguments]
    sys.argv = ["hyradix", "bench", "kernels", "--device", "cuda", *arguments]
    cli.main()
    return 0


def compile_only(wanted: list[str], *, tune: bool) -> int:
    """Of the sections named, or of all."""
    import torch

    from benchmarks.triton_offline import compiled_for

    known = [path.stem for path in sorted(GPU.glob("*.py")) if "\ndef benches(" in path.read_text()]
    seen = set()
    print("kernel, warps: registers, local bytes, shared bytes (sm_90)")
    for name in wanted or known:
        section = import_module(f"benchmarks.gpu.{name}")
        for bench in section.benches(torch.device("meta"), tune=tune):
            with compiled_for(90) as found:
                bench.build(1)[0]()
            for x in found:
                key = (x.name, x.num_warps, x.registers, x.local_bytes, x.shared_bytes, bench.name)
                if key not in seen:
                    seen.add(key)
                    print(f"{bench.name:34} {bench.batch:5} {x.name:22} {x.num_warps:2}: "
                          f"{x.registers:4} {x.local_bytes:5} {x.shared_bytes:7} {bench.note}",
                          flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

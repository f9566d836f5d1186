"""What ``hyradix memory --device cuda`` predicts beside what an engine on the GPU allots and uses.

    python benchmarks/gpu_memory.py [--shape CONFIG] [--requests 64] [--json OUT]

Both from the same settings, all else by default: KV slots and states of both pools, and the
memory in use after the graphs and after full prefill steps, as the driver counts it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.figures import save  # noqa: E402
from hyradix.config import Settings  # noqa: E402
from hyradix.engine.bench.engine import Driver  # noqa: E402
from hyradix.engine.memory_plan import (  # noqa: E402
    GpuOptions,
    PlanOptions,
    make_plan,
    read_config,
)
from hyradix.spec_config import DECODE_LOG  # noqa: E402


def in_use() -> int:
    """Bytes of the device that somebody holds."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="benchmarks/configs/shape-4b.json")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    total = torch.cuda.mem_get_info()[1]
    options = PlanOptions(
        budget=total, num_requests=args.requests, decode_log=DECODE_LOG, gpu=GpuOptions()
    )
    plan = make_plan(read_config(args.shape), options, dtype="bfloat16")
    (row,) = plan.rows
    assert plan.beside is not None
    driver = Driver(
        Settings(
            random_weights=args.shape, device="cuda", dtype="bfloat16", max_requests=args.requests
        )
    )
    info, started = driver.engine.info, in_use()
    driver.run([driver.ids(4096) for _ in range(args.requests)], 40)
    slots = {
        "kv_slots": (row.num_kv_slots, info.num_kv_slots),
        "states": (row.num_states, info.num_states - args.requests),
    }
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "device_bytes": total,
        "beside_pools": plan.beside.total,
        "pool_bytes": info.kv_pool_bytes + info.state_pool_bytes,
        **{name: {"predicted": a, "engine": b, "ratio": a / b} for name, (a, b) in slots.items()},
        "in_use_of_device": {"ready": started / total, "under_load": in_use() / total},
        "torch": {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
        },
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    if args.json is not None:
        save(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

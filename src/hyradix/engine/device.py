"""What the machine offers: free memory and processors, container limits included.

Owns: the choice between CPU and GPU, reading the operating system's figures.
Does not know: models.
Read next: ``gpu.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

from hyradix.config import DeviceFacts
from hyradix.engine.gpu import Cuda, Driver, gpu_facts, refusal

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_FALLBACK_BYTES = 4 << 30


def device_facts(
    wanted: str, *, memory_fraction: float, driver: Driver | None = None
) -> DeviceFacts:
    """Facts of the device; ``auto``: the GPU where one can be used, else the CPU.

    Raises ``ConfigError`` for a GPU that was asked for and cannot be used.
    """
    driver = driver or Cuda()
    if wanted == "cuda" or (wanted == "auto" and refusal(driver) is None):
        return gpu_facts(driver, memory_fraction, num_threads=_num_processors())
    return DeviceFacts(kind="cpu", free_bytes=_free_bytes(), num_threads=_num_processors())


def _free_bytes() -> int:
    available = _FALLBACK_BYTES
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _num_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    quota_file = _CGROUP / "cpu.max"
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

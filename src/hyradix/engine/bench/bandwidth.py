"""How fast memory and products are here and now: what figures of the same run are held against.

Owns: ``Bandwidth`` and how it is measured, the rate of a product. Does not know: kernels, models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

_GPU_BYTES, _CPU_BYTES = 1 << 30, 128 << 20
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second. copy counts what is read and what is written."""

    copy: float
    read: float

    def as_json(self) -> dict[str, float]:
        """Terabytes a second."""
        return {name: float(f"{value * 1e-12:.4g}") for name, value in asdict(self).items()}


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """A copy and a read of buffers far larger than the caches: medians.

    Effects: holds twice ``num_bytes`` of the device (2 GiB of a GPU) for the moment.
    """
    num_bytes = num_bytes or (_GPU_BYTES if device.type == "cuda" else _CPU_BYTES)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = _seconds(partial(target.copy_, source), device)
    read = _seconds(source.sum, device)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Bandwidth(2 * num_bytes / copied, num_bytes / read)


def measure_gemm(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Floating-point operations a second of a large square product."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds, warm."""
    run()
    if device.type != "cuda":
        return statistics.median(_wall(run) for _ in range(_ROUNDS))
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3)
    return statistics.median(times)


def _wall(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started

"""Which GPU there is, whether it will do, and how much of its memory may be used.

Owns: the refusals of a GPU, each saying what is needed. Does not know: models, pools.
Invariant: nothing here allocates; asking costs a CUDA context at most.
Read next: ``device.py`` (the choice), ``hyradix/device_bytes.py`` (what the memory is for).
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch

from hyradix.config import MIB, DeviceFacts
from hyradix.errors import ConfigError

LEAST_CAPABILITY = (8, 0)


class Driver(Protocol):
    """What is asked of a machine; tests bring their own."""

    def is_built(self) -> bool:
        """Whether this torch was built with CUDA."""

    def has_device(self) -> bool:
        """Whether torch sees a device."""

    def has_triton(self) -> bool:
        """Whether Triton is installed."""

    def capability(self) -> tuple[int, int]:
        """Of the device that torch uses."""

    def name(self) -> str:
        """Of that device."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""


class Cuda:
    """The machine's own ``Driver``."""

    def is_built(self) -> bool:
        return bool(torch.backends.cuda.is_built())

    def has_device(self) -> bool:
        return torch.cuda.is_available()

    def has_triton(self) -> bool:
        return importlib.util.find_spec("triton") is not None

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()


def refusal(driver: Driver) -> str | None:
    """Why no GPU can be used here; None: one can."""
    if not driver.is_built():
        return "this torch was built without CUDA: install a CUDA build of torch"
    if not driver.has_device():
        return "torch sees no CUDA device (no driver, or CUDA_VISIBLE_DEVICES hides it)"
    major, minor = driver.capability()
    if (major, minor) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return (
            f"{driver.name()} has compute capability {major}.{minor}; the kernels need {least} or "
            "newer"
        )
    if not driver.has_triton():
        return "the kernels are compiled by Triton, which is not installed: pip install triton"
    return None


def gpu_facts(driver: Driver, fraction: float, *, num_threads: int) -> DeviceFacts:
    """Facts of the GPU now. Raises ``ConfigError`` where none can be used.

    ``free_bytes``: ``fraction`` of the memory, less what anybody has allocated.
    """
    reason = refusal(driver)
    if reason is not None:
        raise ConfigError(f"--device cuda: {reason}; or use --device cpu", param="device")
    free, total = driver.memory()
    usable = int(total * fraction) - (total - free)
    if usable <= 0:
        raise ConfigError(
            f"--memory-fraction {fraction} of {driver.name()} is {total * fraction / MIB:.0f} MiB, "
            f"but {(total - free) / MIB:.0f} of {total / MIB:.0f} MiB are in use already",
            param="memory_fraction",
        )
    return DeviceFacts(
        kind="cuda",
        free_bytes=usable,
        num_threads=num_threads,
        name=driver.name(),
        total_bytes=total,
    )

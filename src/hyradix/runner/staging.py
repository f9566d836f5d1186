"""All integers of a step on their way to the device, and its results on their way back.

Owns: pinned host buffers in rings, and the fences that say when one may be used again.
Does not know: what the numbers mean, models, batches.

Invariants:
- One copy to the device a step; what it reads stays unchanged until its fence has passed.
- Every array begins at a multiple of 16 bytes: kernels see one alignment, so none is compiled anew.
- The front of the device buffer never moves: CUDA graphs read it. What is behind it may be replaced
  by a larger one, when a step has more numbers than any before it.
- Nothing here waits for a step, but for a ring's oldest buffer.
Read next: ``device_runner.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hyradix.request import Int32Array

ALIGNMENT = 4
"""Words of 4 bytes."""
DEPTH = 3
"""Buffers of a ring: two steps in flight, and the one that is being filled."""
Numbers = npt.NDArray[Any]
_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


class Fence(Protocol):
    """A place in the device's stream of work."""

    def record(self) -> None:
        """Put it behind everything that was launched so far."""

    def wait(self) -> None:
        """Wait until the device has passed it; at once where it was never recorded."""


class CudaFence:
    """An event of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """See ``Fence``."""
        self._event.record()

    def wait(self) -> None:
        """See ``Fence``."""
        self._event.synchronize()


class NoFence:
    """On the CPU every launch is done when it returns."""

    def record(self) -> None:
        """Nothing to mark."""

    def wait(self) -> None:
        """Nothing to wait for."""


def make_fence(device: torch.device) -> Fence:
    """The fence of a device."""
    return CudaFence() if device.type == "cuda" else NoFence()


def pinned(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 host memory that the device copies from and to without waiting."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")


def aligned(num_words: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_words // ALIGNMENT) * ALIGNMENT


class Staging:
    """The way down: ``num_static`` words of fixed place, and any number of arrays behind them."""

    def __init__(
        self,
        device: torch.device,
        num_static: int,
        num_extra: int,
        *,
        fence: Callable[[torch.device], Fence] = make_fence,
    ) -> None:
        assert num_static % ALIGNMENT == 0
        whole = torch.zeros(num_static + aligned(num_extra), dtype=torch.int32, device=device)
        self.static = whole[:num_static]
        """On the device; graphs read views of it."""
        self._device = device
        self._whole: torch.Tensor | None = whole
        self._extra = whole[num_static:]
        self._ring = [(pinned((len(whole),), device), fence(device)) for _ in range(DEPTH)]
        self._next = 0

    def send(self, static: Int32Array, extras: Sequence[Numbers]) -> list[torch.Tensor]:
        """Copy the fixed part and the arrays (int32, int64, float64) to the device.

        Returns: views of the arrays there, valid until the next call. Effects: may wait for the
        copy of ``DEPTH`` calls ago.
        """
        offsets, total = [], len(self.static)
        for array in extras:
            offsets.append(total)
            total += aligned(array.nbytes // 4)
        buffer, fence = self._take(total)
        words = buffer.numpy()
        words[: len(static)] = static
        for offset, array in zip(offsets, extras, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.int32)
            words[offset : offset + len(flat)] = flat
        self._copy(buffer, total)
        fence.record()
        return [self._view(*entry) for entry in zip(offsets, extras, strict=True)]

    def _take(self, num_words: int) -> tuple[torch.Tensor, Fence]:
        """The oldest buffer of the ring, large enough and read by nobody."""
        index, self._next = self._next, (self._next + 1) % DEPTH
        buffer, fence = self._ring[index]
        fence.wait()
        if len(buffer) < num_words:
            buffer = pinned((num_words + num_words // 2,), self._device)
            self._ring[index] = buffer, fence
        return buffer, fence

    def _copy(self, buffer: torch.Tensor, total: int) -> None:
        num_static = len(self.static)
        if total - num_static > len(self._extra):
            size = total - num_static
            self._extra = torch.zeros(size + size // 2, dtype=torch.int32, device=self._device)
            self._whole = None
        if self._whole is not None:
            self._whole[:total].copy_(buffer[:total], non_blocking=True)
            return
        self.static.copy_(buffer[:num_static], non_blocking=True)
        part = self._extra[: total - num_static]
        part.copy_(buffer[num_static:total], non_blocking=True)

    def _view(self, offset: int, array: Numbers) -> torch.Tensor:
        first = offset - len(self.static)
        words = self._extra[first : first + array.nbytes // 4]
        return words.view(_TYPES[array.dtype.name]).view(array.shape)


class Results:
    """The way up: ``[2, M]`` int32, tokens and whether they are faulty, of each step in flight."""

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        *,
        fence: Callable[[torch.device], Fence] = make_fence,
    ) -> None:
        self._free = deque((pinned((2, max_rows), device), fence(device)) for _ in range(DEPTH))

    def fetch(self, found: torch.Tensor) -> Pending:
        """Start copying ``found`` ``int32[2, M]`` to the host, behind what was launched so far."""
        buffer, fence = self._free.popleft()
        count = found.shape[1]
        for to, row in zip(buffer, found, strict=True):  # rows are contiguous, the whole is not
            to[:count].copy_(row, non_blocking=True)
        fence.record()
        return Pending(self._free, buffer, fence, count)


class Pending:
    """One step's results before they are on the host."""

    def __init__(
        self,
        free: deque[tuple[torch.Tensor, Fence]],
        buffer: torch.Tensor,
        fence: Fence,
        count: int,
    ) -> None:
        self._free = free
        self._buffer = buffer
        self._fence = fence
        self._count = count

    def wait(self) -> Int32Array:
        """``int32[2, M]`` of its own memory; once."""
        self._fence.wait()
        numbers: Int32Array = self._buffer.numpy()[:, : self._count].copy()
        self._free.append((self._buffer, self._fence))
        return numbers

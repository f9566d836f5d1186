"""What Triton kernels leave for each other between launches: allocated once, used by all layers.

Owns: one object of each kind and shape, its growth. Does not know: what is in it.

Invariants:
- What ``get`` returned stays allocated, so a CUDA graph may hold its addresses.
- After ``reserve`` steps of that size allocate nothing here.
Read next: ``triton_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hyradix.kernels.memory import physical_bytes

Maker = Callable[..., Any]
"""``maker(capacity, *sizes, device)``."""


class Scratch:
    """Scratch of any kind, by its class and the sizes of a layer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._declared: dict[tuple[Maker, tuple[int, ...]], tuple[bool, int]] = {}
        self._held: dict[tuple[Maker, tuple[int, ...]], tuple[int, Any]] = {}
        self._outgrown: list[Any] = []

    def declare(self, maker: Maker, *sizes: int, by_row: bool, least: int = 1) -> None:
        """Layers will ask for this: with as many rows as decode, or as many tokens as there are."""
        self._declared[maker, sizes] = by_row, least

    def reserve(self, max_tokens: int, max_rows: int) -> int:
        """Allocate all that is declared; returns the bytes that are held."""
        for (maker, sizes), (by_row, least) in self._declared.items():
            self.get(maker, max(max_rows if by_row else max_tokens, least), *sizes)
        return self.num_bytes

    def get(self, maker: Maker, capacity: int, *sizes: int) -> Any:
        """An object for at least ``capacity`` rows or tokens."""
        held, found = self._held.get((maker, sizes), (0, None))
        if found is None or held < capacity:
            if found is not None:
                self._outgrown.append(found)
                capacity = max(capacity, 2 * held)
            found = maker(capacity, *sizes, self._device)
            self._held[maker, sizes] = capacity, found
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is held."""
        return physical_bytes(
            *_tensors([*self._outgrown, *(found for _, found in self._held.values())])
        )


def _tensors(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What the objects hold, and what the objects in them do."""
    for found in objects:
        if isinstance(found, torch.Tensor):
            yield found
        elif hasattr(found, "__dict__"):
            yield from _tensors(vars(found).values())

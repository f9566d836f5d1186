"""What a launch may touch, checked access by access in Triton's interpreter.

Owns: ``MemoryCheck`` and ``checked_memory``, which hooks the interpreter's loads, stores and
atomics. Does not know: kernels, values.

Invariants:
- Every active address lies inside some tensor argument of its launch (the view's own extent, not
  its storage's), or inside a tensor that was registered; none is misaligned for its type. Inactive
  addresses may be anything.
- ``races=True``: no byte is stored by two programs of one launch, or stored by one and loaded by
  another, unless the kernel's name is in ``ORDERED``.
Read next: ``conftest.py`` (every test of this folder runs under it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from hyradix.kernels.state_slots.triton import Registry

ORDERED = frozenset({"_step_kernel", "_log_step_kernel", "units_kernel"})
"""Kernels whose programs read what others stored, behind an atomic counter."""


class MemoryFault(AssertionError):
    """An access that a device would refuse, or one whose result depends on the order."""


class MemoryCheck:
    """The extents of the launch that is running, and who touched what in it."""

    def __init__(self, *, races: bool = False) -> None:
        self.races = races
        self.num_accesses = 0
        self._pointed: list[torch.Tensor] = []
        self._kernel = ""
        self._names: list[str] = []
        self._starts = self._ends = np.zeros(0, np.int64)
        self._touched: dict[bool, list[tuple[np.ndarray, int]]] = {}

    def register(self, *tensors: torch.Tensor) -> None:
        """Tensors that kernels reach by addresses in other tensors; held until the check ends."""
        self._pointed += tensors

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """A launch with these arguments starts."""
        self._kernel, self._touched = kernel, {False: [], True: []}
        tensors = [(name, x) for name, x in arguments.items() if isinstance(x, torch.Tensor)]
        tensors += [("registered", x) for x in self._pointed]
        extents = sorted((*_extent(x), name) for name, x in tensors if x.numel())
        merged: list[tuple[int, int, str]] = []
        for start, end, name in extents:
            if merged and start <= merged[-1][1]:
                last = merged.pop()
                merged.append((last[0], max(last[1], end), f"{last[2]}, {name}"))
            else:
                merged.append((start, end, name))
        self._starts = np.array([x[0] for x in merged], np.int64)
        self._ends = np.array([x[1] for x in merged], np.int64)
        self._names = [x[2] for x in merged]

    def touch(self, pointers: Any, mask: Any, *, is_store: bool) -> None:
        """Active addresses of one access by one program."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        active = np.broadcast_to(mask.data.astype(bool), shape)  # it may be one of bytes
        addresses = np.broadcast_to(pointers.data, shape)[active].astype(np.int64)
        if not addresses.size:
            return
        self.num_accesses += addresses.size
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        where = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (where < 0) | (addresses + size > self._ends[np.maximum(where, 0)])
        if outside.any():
            raise MemoryFault(self._describe(int(addresses[outside][0]), is_store, "outside"))
        if (addresses % size).any():
            first = int(addresses[addresses % size != 0][0])
            raise MemoryFault(self._describe(first, is_store, f"misaligned for {size} bytes"))
        if self.races and self._kernel not in ORDERED:
            program = hash(interpreter.interpreter_builder.grid_idx)
            self._touched[is_store].append((np.unique(addresses), program))

    def end(self) -> None:
        """The launch has ended: look for what depends on the order of its programs."""
        stores, loads = (_by_address(self._touched[kind]) for kind in (True, False))
        address, owner = stores
        twice = (address[1:] == address[:-1]) & (owner[1:] != owner[:-1])
        if twice.any():
            raise MemoryFault(self._describe(int(address[1:][twice][0]), True, "by two programs"))
        if not address.size or not loads[0].size:
            return
        at = np.minimum(np.searchsorted(address, loads[0]), address.size - 1)
        foreign = (address[at] == loads[0]) & (owner[at] != loads[1])
        if foreign.any():
            raise MemoryFault(self._describe(int(loads[0][foreign][0]), False, "of a store beside"))

    def _describe(self, address: int, is_store: bool, what: str) -> str:
        program = interpreter.interpreter_builder.grid_idx
        where = int(np.searchsorted(self._starts, address, side="right")) - 1
        near = "before all"
        if where >= 0:
            near = f"{address - int(self._starts[where])} bytes behind the start of "
            near += f"{self._names[where]} ({int(self._ends[where] - self._starts[where])} bytes)"
        kind = "store" if is_store else "load"
        return f"{self._kernel}, program {program}: {kind} {what}: {near}"


@contextmanager
def checked_memory(*, races: bool = False) -> Iterator[MemoryCheck]:
    """Every launch inside is checked; raises ``MemoryFault`` (inside an ``InterpreterError``)."""
    check = MemoryCheck(races=races)
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    run, arguments = executor.__call__, executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas, made = builder.create_atomic_rmw, builder.create_atomic_cas, Registry.__init__

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        check.end()

    def on_host(self: Any, args: Any, kwargs: Any) -> Any:
        found, named = arguments(self, args, kwargs)
        check.begin(self.fn.__name__, {**dict(zip(self.arg_names, found, strict=False)), **named})
        return found, named

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check.touch(pointers, mask, is_store=False)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check.touch(pointers, mask, is_store=True)
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check.touch(pointers, mask, is_store=False)
        return rmw(self, op, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        every = interpreter.TensorHandle(np.ones(pointers.data.shape, bool), interpreter.tl.int1)
        check.touch(pointers, every, is_store=False)
        return cas(self, pointers, *rest)

    def registered(self: Registry, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        check.register(*self.tensors)

    with (
        mock.patch.object(executor, "__call__", checked_run),
        mock.patch.object(executor, "_init_args_hst", on_host),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(builder, "create_atomic_rmw", checked_rmw),
        mock.patch.object(builder, "create_atomic_cas", checked_cas),
        mock.patch.object(Registry, "__init__", registered),
    ):
        yield check


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last that the view has."""
    span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (span + 1) * x.element_size()


def _by_address(found: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses in ascending order, and who touched them."""
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    address = np.concatenate([x for x, _ in found])
    owner = np.concatenate([np.full(len(x), program, np.int64) for x, program in found])
    order = np.lexsort((owner, address))
    return address[order], owner[order]

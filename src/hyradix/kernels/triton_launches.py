"""Starting a kernel that was started before, without having Triton find it again.

Owns: compiled kernels by what Triton tells launches apart by. Does not know: which kernels there
are, what they do, how one is compiled.

Of 30 arguments Triton takes 10 to 20 us to find the compiled kernel, and asks the driver about
every pointer; a step with prefill has hundreds of launches. Here the same takes a third.

Invariants:
- Triton decides at the first launch of a key, by its own path; the key is never coarser than what
  it specialises on (``python/src/specialize.cc`` of 3.6): the types of all arguments, and of a
  tensor its element type and whether its address is a multiple of 16; of a tensor descriptor the
  element type, the tile and what is read outside; of an integer its width,
  whether it is 1 and a multiple of 16 (here: its value); of a constant its value; the options. An
  integer that is in ``do_not_specialize`` counts by its width alone.
- Where anything is not as known (another version of Triton, hooks, a kernel that is patched or
  interpreted, integers of 64 bits), the launch goes Triton's way.
Read next: ``triton_support.py`` (the caller).
"""
# mypy: ignore-errors
# (what is touched here is Triton's inside, which has no types)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

IS_KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton is one whose launches were read; by others all go Triton's way."""
MOST = 1024
"""Keys of one kernel; where there are more, something varies that ought not to: all are dropped."""
_INT32 = 1 << 31
_RUN = JITFunction.run
_HOOKS = triton.knobs.runtime
_TABLES: dict[int, Launches] = {}
"""By the identity of the kernel, as Triton keeps its own: a kernel's hash is that of its source."""


Divert = Callable[[Any, Any, tuple[int, ...], tuple[Any, ...], dict[str, int]], None]
"""Takes kernel, key (None: unknown), grid, arguments and options of a launch."""
_DIVERT: ContextVar[Divert | None] = ContextVar("divert", default=None)


@contextmanager
def diverted(divert: Divert) -> Iterator[None]:
    """Launches inside go to ``divert`` instead of the device."""
    token = _DIVERT.set(divert)
    try:
        yield
    finally:
        _DIVERT.reset(token)


def start(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, int]
) -> None:
    """As ``kernel[grid](*args, **options)``; constants are the last arguments."""
    if type(kernel) is not JITFunction or JITFunction.run is not _RUN or not IS_KNOWN:
        kernel[grid](*args, **options)
        return
    launches = _TABLES.get(id(kernel))
    if launches is None:
        launches = _TABLES[id(kernel)] = Launches(kernel, args)
    divert = _DIVERT.get()
    if divert is None:
        launches.start(grid, args, options)
    else:
        divert(kernel, launches.key(args, options), grid, args, options)


class Launches:
    """Of one kernel. Which arguments are tensors is taken from the first launch."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._driver = triton.runtime.driver.active
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        parameters = kernel.params
        self._num_given = sum(not p.is_constexpr for p in parameters)
        given = range(self._num_given)
        self._tensors = [i for i in given if isinstance(args[i], torch.Tensor)]
        self._described = [i for i in given if isinstance(args[i], TensorDescriptor)]
        others = [i for i in given if i not in self._tensors and i not in self._described]
        self._free = [i for i in others if parameters[i].do_not_specialize]
        self._special = _getter([i for i in others if i not in self._free])
        is_ordered = all(p.is_constexpr for p in parameters[self._num_given :])
        self._is_usual = is_ordered and len(args) == len(parameters)

    def start(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, int]) -> None:
        """See ``triton_launches.start``."""
        given = list(args)
        key = self._key(given, args, options)
        found = self._compiled.get(key)
        if found is None or self._kernel.pre_run_hooks or _is_watched():
            compiled = self._kernel[grid](*args, **options)
            if key is not None:
                self._remember(key, compiled)
            return
        run, function, metadata = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = self._driver.get_current_stream(key[0])
        run(x, y, z, stream, function, metadata, None, None, None, *given)

    def key(self, args: tuple[Any, ...], options: dict[str, int]) -> tuple[Any, ...] | None:
        """By what these arguments are told from others; None: not here."""
        return self._key(list(args), args, options)

    def _key(
        self, given: list[Any], args: tuple[Any, ...], options: dict[str, int]
    ) -> tuple[Any, ...] | None:
        """As ``key``. given: the arguments. Effects: tensors in it become their addresses."""
        if not self._is_usual:
            return None
        special = self._special(args)
        key = [
            self._driver.get_current_device(),
            special,
            tuple(map(type, special)),
            args[self._num_given :],
            tuple(options.items()),
        ]
        for i in self._free:
            number = given[i]
            if type(number) is not int or not -_INT32 <= number < _INT32:
                return None
        for i in self._described:
            tiles = given[i]
            if not isinstance(tiles, TensorDescriptor):
                return None
            key += (tiles.base.dtype, *tiles.block_shape, tiles.padding)
        for i in self._tensors:
            tensor = given[i]
            if not isinstance(tensor, torch.Tensor):
                return None
            given[i] = address = tensor.data_ptr()
            key.append(tensor.dtype)
            if address & 15:
                key.append(i)
            if not tensor.is_cuda:  # Triton refuses one on the host
                key.append(~i)
        return tuple(key)

    def _remember(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Unless an argument is a tensor that was none at first: it is not to be held here."""
        if any(issubclass(x, torch.Tensor) for x in key[2]):
            return
        run, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
        metadata = getattr(compiled, "packed_metadata", None)
        if callable(run) and function is not None and metadata is not None:
            if len(self._compiled) >= MOST:
                self._compiled.clear()
            self._compiled[key] = run, function, metadata


def _is_watched() -> bool:
    """Whether somebody asked to be told of launches (profilers)."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _getter(positions: list[int]) -> Any:
    """A function from arguments to the tuple of those."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda args: tuple([args[i] for i in positions])

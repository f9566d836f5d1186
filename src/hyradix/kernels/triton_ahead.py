"""Compiling all kernels of a rehearsal at once, before any of them is started.

Owns: the threads that compile, and the launches that are put off. Does not know: which steps are
rehearsed, whether there is a device.

Most of a compilation is LLVM (which releases the interpreter), ptxas and the C compiler (processes
of their own), so threads share it well: 16 kernels take 5.1 s in one thread and 3.0 in two, of two
cores that others use too.

Invariants:
- Inside ``compiled_ahead`` a launch starts nothing. What torch computes between launches works on
  memory that nobody has written: only for steps whose indices come from the host.
- A kernel that cannot be compiled says so where it is launched in earnest, not here.
Read next: ``triton_launches.py``.
"""
# mypy: ignore-errors
# (what is touched here is Triton's inside, which has no types)

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton

from hyradix.kernels.triton_launches import IS_KNOWN, diverted

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # before Triton 3.5
    AsyncCompileMode = None

MOST_THREADS = 32
OnProgress = Callable[[int, int], None]


@contextmanager
def compiled_ahead(on_progress: OnProgress, num_threads: int) -> Iterator[bool]:
    """Launches inside start nothing; their kernels are ready when this ends.

    Yields: whether it can be done; if not, launches inside are as ever.
    """
    if AsyncCompileMode is None or not IS_KNOWN:
        yield False
        return
    seen: set[Any] = set()

    def submit(
        kernel: Any, key: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        if key is None or (id(kernel), key) not in seen:
            seen.add((id(kernel), key))
            kernel.warmup(*args, grid=grid, **options)

    with (
        ThreadPoolExecutor(min(num_threads, MOST_THREADS), "compile") as pool,
        AsyncCompileMode(Builder(pool), ignore_errors=True) as mode,
    ):
        with diverted(submit):
            yield True
        total = len(mode.raw_futures)
        for done, _ in enumerate(as_completed(mode.raw_futures)):
            on_progress(done, total)


class Builder:
    """An executor (its ``submit``) that compiles, and builds what starts the kernel besides."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """The compiled kernel to come."""
        return self._pool.submit(self._build, compile_kernel)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        """A launcher is a C module in Triton's cache: built here, it is only loaded later."""
        compiled = compile_kernel()
        make_launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
        if make_launcher is not None:
            make_launcher(compiled.src, compiled.metadata)
        return compiled

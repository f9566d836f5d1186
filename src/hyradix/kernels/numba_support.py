"""How compiled CPU kernels are compiled: one decorator, one thread pool, and vectorisable maths.

Owns: the ``compiled`` decorator, thread settings, ``exp32`` and its relatives.
Does not know: what the kernels compute.

Invariants:
- Kernels use the OpenMP layer where there is one: numba's pool then binds to the libgomp that
  torch has already loaded, so both share one set of threads and never oversubscribe.
- Floating-point flags are ``contract`` and ``reassoc`` only: NaN and infinity pass through, and a
  given binary computes the same bits for the same row whatever else is in the batch.
- A directory that cannot be written to costs the on-disk cache, nothing else.
Read next: ``compiled_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch  # loads libgomp first, so that numba's OpenMP layer binds to the same copy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def prefer_openmp() -> None:
    """Choose the OpenMP layer where there is one. Call before the first parallel kernel runs."""
    config: Any = numba.config
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def set_num_threads(num_threads: int) -> None:
    """Give torch and the compiled kernels the same number of threads.

    torch last: numba's first call starts its threads and gives the shared OpenMP all of them.
    """
    config: Any = numba.config
    numba.set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))
    torch.set_num_threads(num_threads)


_ONLY_PRANGE = dict.fromkeys(
    ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False
) | {"prange": True}
"""Nothing but explicit loops is made parallel: the rest would only cost compilation."""


def compiled(*, parallel: bool = False, inline: bool = False) -> Callable[[Any], Any]:
    """``numba.njit`` with this package's flags, cached on disk where that is possible."""

    def wrap(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {
            "nogil": True,
            "parallel": dict(_ONLY_PRANGE) if parallel else False,
            "fastmath": {"contract", "reassoc"},
            "error_model": "numpy",
        }
        if inline:
            options["forceinline"] = True
        try:
            return _tie_to_all_sources(numba.njit(cache=True, **options)(function))
        except RuntimeError:  # no directory for the cache can be written to
            return numba.njit(**options)(function)

    return wrap


def _stamp_sources() -> tuple[tuple[str, int, int], ...]:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)


_SOURCES = _stamp_sources()


def _tie_to_all_sources(dispatcher: Any) -> Any:
    """Make a cached kernel stale when ANY kernel file changes.

    numba itself looks at the file of the function alone, not at what is inlined into it.
    """
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, _SOURCES)
    return dispatcher


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_MAX = np.float32(88.0)
_MIN = np.float32(-87.0)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)


@compiled(inline=True)
def exp32(x):  # type: ignore[no-untyped-def]
    """float32 exp within 2 ulp, made of operations that vectorise (libm's does not). NaN stays."""
    if x > _MAX:
        x = _MAX
    if x < _MIN:
        x = _MIN
    n = np.floor(x * _LOG2E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C0 * r + _C1
    p = p * r + _C2
    p = p * r + _C3
    p = p * r + _C4
    p = p * r + _C5
    y = p * (r * r) + r + _ONE
    bits = (np.int32(n) + np.int32(127)) << np.int32(23)
    return y * float_from_bits(bits)  # type: ignore[call-arg]


@compiled(inline=True)
def sigmoid32(x):  # type: ignore[no-untyped-def]
    """float32 logistic function."""
    return _ONE / (_ONE + exp32(-x))


@compiled(inline=True)
def silu32(x):  # type: ignore[no-untyped-def]
    """float32 x * sigmoid(x)."""
    return x / (_ONE + exp32(-x))

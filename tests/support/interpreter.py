"""Triton's interpreter, which multiplies the bits of bfloat16 operands as if they were integers,
and cuts a float32 number off where it becomes bfloat16: twice the error of a device, all one way.

``mend_bfloat16`` mends both, so that whole models of bfloat16 weights run under it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mend_bfloat16() -> None:
    """As on a device: ``tl.dot`` sums products in float32, and float32 becomes the nearest bfloat16
    (ties to even)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    if plain.__name__ == "mended":
        return

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def mended(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, wide(a), wide(b), *rest)

    def cast(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return plain_cast(self, source, to)
        return TensorHandle(_rounded(source.data), tl.bfloat16)

    InterpreterBuilder.create_dot = mended
    InterpreterBuilder.cast_impl = cast


def _rounded(x: Any) -> Any:
    """The bits of the nearest bfloat16 numbers. Infinities stay, a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)

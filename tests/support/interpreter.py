"""Triton's interpreter, which multiplies the bits of bfloat16 operands as if they were integers.

``multiply_bfloat16`` mends that, so that whole models of bfloat16 weights run under it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def multiply_bfloat16() -> None:
    """Make ``tl.dot`` of bfloat16 operands what it is on a device: products summed in float32."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot
    if plain.__name__ == "mended":
        return

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def mended(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, wide(a), wide(b), *rest)

    InterpreterBuilder.create_dot = mended

"""Products near float32 by float16 matrix units: every number as two float16 numbers, three passes.

Owns: the split, its scale, the product. Does not know: shapes, launches.

x = high + low, 11 bits each: what three passes of tf32 see, at half their time, and a pair takes as
many bytes in memory as a float32.

Invariants:
- What is split has been multiplied such that its largest number is near ``ONE``, which leaves
  float16 3 bits above. So 2^-22 of a number is lost, or of a small one 2^-37 of the largest.
- What is bounded by its meaning (parts of unit vectors, their products, decays) is taken ``ONE``
  times; what is not (values, states) is divided by ``scale_of`` it, a power of two.
Read next: ``gated_delta_rule/triton.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(4096.0)
_EXPONENT = tl.constexpr(12 << 23)
"""Of ``ONE``, among the bits of a float32."""


@triton.jit
def split(x):
    """(high, low) of float32 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def scale_of(x):
    """(s, 1 / s), s a power of two: the largest number of x ``[A, B]`` is s times ONE to 2 ONE."""
    largest = tl.max(tl.abs(x))
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, _EXPONENT + (1 << 23)) - _EXPONENT  # s is never subnormal
    inverse = 0x7F000000 - exponent
    return exponent.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def dot(a_high, a_low, b_high, b_low):
    """a b of what the pairs hold, float32."""
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low)))


@triton.jit
def dot_for(a_high, a_low, b_high, b_low, IS_EXACT: tl.constexpr):
    """The same, or by the high numbers alone (low ones are not used)."""
    if IS_EXACT:
        return dot(a_high, a_low, b_high, b_low)
    return tl.dot(a_high, b_high)

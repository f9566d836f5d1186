"""Marks of tests that need a machine of some kind."""

from __future__ import annotations

import pytest

from hyradix.kernels.linear import compiled

needs_tiles = pytest.mark.skipif(
    not compiled.is_supported(),
    reason="no wide registers: a BLAS multiplies",
)
"""What only register tiles promise: the same bits in any batch. Runs on a CPU with AVX-512."""

"""silu(gate) * up, compiled. Rows are independent. Read next: ``reference.py`` (its twin)."""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

from numba import prange

from hyradix.kernels.numba_support import compiled, silu32


@compiled()
def _row(gate_up, out, t):
    size = out.shape[1]
    gate, up, target = gate_up[t, :size], gate_up[t, size:], out[t]
    for c in range(size):
        target[c] = silu32(gate[c]) * up[c]


@compiled()
def swiglu_serial(gate_up, out):
    """``[T, 2I]`` -> ``[T, I]`` float32 on one thread."""
    for t in range(out.shape[0]):
        _row(gate_up, out, t)


@compiled(parallel=True)
def swiglu_parallel(gate_up, out):
    """``swiglu_serial`` over all threads."""
    for t in prange(out.shape[0]):
        _row(gate_up, out, t)

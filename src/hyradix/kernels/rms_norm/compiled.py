"""Root-mean-square norm, compiled. Rows are independent. Read next: ``reference.py`` (its twin)."""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled

_ONE = np.float32(1.0)


@compiled()
def _row(row, weight, eps, target):
    size = row.size
    total = np.float32(0.0)
    for c in range(size):
        total += row[c] * row[c]
    factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    for c in range(size):
        target[c] = row[c] * factor * weight[c]


@compiled()
def rms_norm(x, weight, eps, out):
    """out[t] = x[t] / rms(x[t]) * weight, for ``[T, C]`` float32; memory speed on one thread."""
    for t in range(x.shape[0]):
        _row(x[t], weight, eps, out[t])

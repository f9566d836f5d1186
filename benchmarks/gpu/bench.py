"""What the sections are written with; it lives in the package, whose command runs them.

A section is a module here with ``checks(device)`` and ``benches(device, tune=)``: see
``hyradix.engine.bench.cases``.
"""

import torch

from hyradix.engine.bench.cases import BATCHES, TUNED, Bench, Call, Check, Checks, time_bench

BANDWIDTH = 4.28e12
"""Copy on one H200, bytes read and written a second (PERFORMANCE.md, section 4)."""
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Of outputs against float64, by the type of activations."""

__all__ = [
    "BANDWIDTH",
    "BATCHES",
    "LIMITS",
    "TUNED",
    "Bench",
    "Call",
    "Check",
    "Checks",
    "time_bench",
]

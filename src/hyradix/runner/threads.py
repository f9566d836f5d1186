"""Thread settings that must stand before torch and numba are loaded.

Owns: environment variables of the OpenMP runtime. Imports neither torch nor numba.
"""

from __future__ import annotations

import os

SPIN_COUNT = "6000"
"""Waiting threads give up spinning after about a tenth of a millisecond. The default never does: a
second busy process on the machine turned steps of 3.4 ms into 336 ms. With 1000 a 40-token prefill
took a tenth longer (threads went to sleep between two products)."""


def prepare_environment() -> None:
    """Call first thing in a process that will compute. The user's own settings win."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

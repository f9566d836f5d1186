"""Thread settings that must stand before torch and numba are loaded.

Owns: environment variables of the OpenMP runtime. Imports neither torch nor numba.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"
"""Waiting threads give up spinning soon: a second busy process on the machine turned steps of
3.4 ms into 336 ms with the default; this costs about 10 % when alone."""


def prepare_environment() -> None:
    """Call first thing in a process that will compute. The user's own settings win."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

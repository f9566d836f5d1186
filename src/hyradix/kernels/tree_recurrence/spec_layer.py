"""What one recurrent layer may write while drafts are verified: its part of the draft buffers.

Owns: ``SpecLayer``, where a node's row and column stand. Does not know: who allocates, who judges.

Invariants:
- A verify writes these arrays and nothing else; what stood there before is of no meaning, the
  valid log rows and their columns apart.
- Row 0 of every array is a sink. Request row r of the batch has row r + 1.
Read next: ``ragged.py`` (which rows and columns a step uses), ``../../state_bytes.py`` (shapes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyradix.state_bytes import SpecStateMode

Array = Any


@dataclass(frozen=True, slots=True)
class SpecLayer:
    """One layer's arrays, each with leading dimension num_requests + 1; float32, conv apart, which
    has the activations' type.

    conv: raw columns ``[N+1, columns, C]``; node t has column ``first_node`` + t. num_base_columns:
    how many of the base's newest columns a verify copies to the front (K-2 in the sliding layout,
    else 0). num_log_rows: R; node t's row in k, u, g has number R + t.
    ``snapshot``: states ``[N+1, T, Hv, K, V]``. ``replay``: states, one array that all layers
    reuse, and k ``[N+1, T, Hk, K]``, v ``[N+1, T, Hv, V]``, g ``[N+1, T, Hv, 1 or K]``, beta
    ``[N+1, T, Hv]``. ``log``: k, u, g ``[N+1, R+T, ...]``. The others are None.
    """

    mode: SpecStateMode
    conv: Array
    first_node: int
    num_base_columns: int = 0
    num_log_rows: int = 0
    states: Array = None
    k: Array = None
    v: Array = None
    u: Array = None
    g: Array = None
    beta: Array = None

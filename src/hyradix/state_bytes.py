"""What each way of keeping recurrent state under speculation takes: buffers, and their bytes.

Owns: the list of buffers of each ``--spec-state`` mode, the one place that knows their shapes: the
planner adds them up, the runner allocates them. Does not know: torch, budgets, attention KV.

Invariants:
- Bytes are physical: what ``shape`` allocates, row 0 included (the sink that padded rows write to).
- Resident: what outlives the judging of drafts (``snapshot``: all of it, since any layer's any node
  may be wanted). Peak: everything, as it stands during a verify.
Source: DESIGN sections 6, 6.1, 6.2. Read next: ``kernels/tree_recurrence/rules.py`` (k, u, g, v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

SpecStateMode = Literal["snapshot", "replay", "log"]
MODES: tuple[SpecStateMode, ...] = ("snapshot", "replay", "log")
ROWS_OF_MODE: dict[SpecStateMode, tuple[str, ...]] = {
    "snapshot": (),
    "replay": ("k", "v", "g", "beta"),
    "log": ("k", "u", "g"),
}
"""What a token leaves in each layer, its conv column apart: names of ``row_shapes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The recurrent layers of a model: L_r layers, Hk and Hv heads, K and V sizes, C conv channels.

    The ``_bytes`` are of one element: state S; k; values (v of a held input); u; gates (g, beta);
    conv columns; hidden. hidden_size: of the target's last hidden state, kept with ``mtp``; 0
    without.
    """

    num_layers: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_channels: int
    conv_width: int
    has_channel_decay: bool = False
    state_bytes: int = 4
    k_bytes: int = 4
    v_bytes: int = 4
    u_bytes: int = 4
    gate_bytes: int = 4
    conv_bytes: int = 4
    hidden_size: int = 0
    hidden_bytes: int = 4

    @property
    def slot_bytes(self) -> int:
        """One slot of the state pool: recurrent state and conv window of every layer."""
        recurrent = self.num_v_heads * self.k_dim * self.v_dim * self.state_bytes
        return self.num_layers * recurrent + self.window_bytes

    @property
    def window_bytes(self) -> int:
        """The conv windows among them."""
        window = self.conv_channels * (self.conv_width - 1) * self.conv_bytes
        return self.num_layers * window

    @property
    def row_shapes(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Shape and element bytes of what a token may leave in one layer."""
        decay = self.k_dim if self.has_channel_decay else 1
        return {
            "k": ((self.num_k_heads, self.k_dim), self.k_bytes),
            "v": ((self.num_v_heads, self.v_dim), self.v_bytes),
            "u": ((self.num_v_heads, self.v_dim), self.u_bytes),
            "g": ((self.num_v_heads, decay), self.gate_bytes),
            "beta": ((self.num_v_heads,), self.gate_bytes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecShape:
    """N requests, T nodes with the root, R rows of log, A tokens accepted at most (steps + 1)."""

    num_requests: int
    num_nodes: int
    num_log_rows: int = 0
    max_accepted: int = 1
    is_chain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One tensor: ``num_requests`` (the sink included) times ``num_rows``, one token's each.

    num_held: rows that outlive the judging. num_written: rows of one request that a verify writes,
    each ``num_passes`` times (a buffer that all layers reuse).
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    num_requests: int
    num_rows: int
    num_held: int
    num_written: int
    num_passes: int = 1

    @property
    def num_bytes(self) -> int:
        """What it allocates."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def resident_bytes(self) -> int:
        """The part that outlives the judging."""
        return self.num_bytes // self.num_rows * self.num_held

    @property
    def written_bytes(self) -> int:
        """Written by a verify of one request."""
        per_row = self.num_bytes // self.num_rows // self.num_requests
        return per_row * self.num_written * self.num_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBytes:
    """Bytes of one mode; written: by one verify of all N requests."""

    resident: int
    peak: int
    written: int


def spec_bytes(mode: SpecStateMode, model: RecurrentShape, spec: SpecShape) -> SpecBytes:
    """The sums over ``buffers``."""
    found = buffers(mode, model, spec)
    return SpecBytes(
        resident=sum(buffer.resident_bytes for buffer in found),
        peak=sum(buffer.num_bytes for buffer in found),
        written=sum(buffer.written_bytes for buffer in found) * spec.num_requests,
    )


def buffers(mode: SpecStateMode, model: RecurrentShape, spec: SpecShape) -> tuple[Buffer, ...]:
    """Every tensor that ``mode`` needs beside the state pool. Shapes: ``[L_r, N+1, rows, ..]``.

    ``snapshot``: ``states`` of all nodes and layers. ``replay``: ``states`` of one layer (no L_r),
    inputs k, v, g, beta, compacted to the accepted ones in place. ``log``: rows k, u, g, the log's
    before the nodes'. All: raw columns ``conv`` ``[L_r, N+1, columns, C]``. With mtp, where rows
    are held: ``hidden`` (no L_r).
    """
    nodes, rows = spec.num_nodes, spec.num_nodes
    state_shape = (model.num_v_heads, model.k_dim, model.v_dim)
    found, names = [], ROWS_OF_MODE[mode]
    if mode == "log":
        rows, held = spec.num_log_rows + nodes, spec.num_log_rows
    elif mode == "replay":
        held = min(spec.max_accepted, nodes)
        states = _buffer("states", spec, rows, 0, state_shape, model.state_bytes)
        found.append(replace(states, num_passes=model.num_layers))
    else:
        held = rows
        states = _buffer("states", spec, rows, held, state_shape, model.state_bytes)
        found.append(_in_all_layers(states, model))
    for name in names:
        row_shape, element_bytes = model.row_shapes[name]
        buffer = _buffer(name, spec, rows, held, row_shape, element_bytes)
        found.append(_in_all_layers(buffer, model))
    found.append(_conv(mode, model, spec, rows, held))
    if model.hidden_size and mode != "snapshot":
        hidden = _buffer("hidden", spec, rows, held, (model.hidden_size,), model.hidden_bytes)
        found.append(hidden)
    return tuple(found)


def conv_columns(num_nodes: int, width: int, *, num_log_rows: int = 0, sliding: bool) -> int:
    """Columns per channel, layer and request: chains T+K-2 (sliding), trees K-1+R+T.

    Dense windows, which exist only in tests, would take T (K-1).
    """
    return num_nodes + width - 2 if sliding else width - 1 + num_log_rows + num_nodes


def conv_bytes(model: RecurrentShape, spec: SpecShape, *, sliding: bool) -> int:
    """Bytes of the columns of all layers and requests in either layout, the sink's included."""
    columns = conv_columns(
        spec.num_nodes, model.conv_width, num_log_rows=spec.num_log_rows, sliding=sliding
    )
    rows = model.num_layers * (spec.num_requests + 1)
    return rows * model.conv_channels * columns * model.conv_bytes


def _conv(
    mode: SpecStateMode, model: RecurrentShape, spec: SpecShape, rows: int, held: int
) -> Buffer:
    sliding = mode == "snapshot" and spec.is_chain
    columns = conv_columns(
        spec.num_nodes,
        model.conv_width,
        num_log_rows=rows - spec.num_nodes,
        sliding=sliding,
    )
    return Buffer(
        name="conv",
        shape=(model.num_layers, spec.num_requests + 1, columns, model.conv_channels),
        element_bytes=model.conv_bytes,
        num_requests=spec.num_requests + 1,
        num_rows=columns,
        num_held=columns if mode == "snapshot" else model.conv_width - 1 + held,
        num_written=columns if sliding else spec.num_nodes,
    )


def _buffer(
    name: str,
    spec: SpecShape,
    rows: int,
    held: int,
    row_shape: tuple[int, ...],
    element_bytes: int,
) -> Buffer:
    return Buffer(
        name=name,
        shape=(spec.num_requests + 1, rows, *row_shape),
        element_bytes=element_bytes,
        num_requests=spec.num_requests + 1,
        num_rows=rows,
        num_held=held,
        num_written=spec.num_nodes,
    )


def _in_all_layers(buffer: Buffer, model: RecurrentShape) -> Buffer:
    return replace(buffer, shape=(model.num_layers, *buffer.shape))

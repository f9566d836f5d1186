"""Log rows and node states into state slots: all layers, heads and windows in one launch.

Owns: ``fold_`` and ``copy_nodes_``, the fast twins of ``keeping.py``. Does not know: which
movements are due.

Invariants:
- Slots 0 as targets are padding: nothing is done. Other targets differ.
- A fold is float32, row by row; a row's decay is the sum of what follows it: no
  difference of sums is taken. Rows past a count are not read.
  Count 0: the base's bits.
- Every element of a target is written by the program that read it from the source, so both may be
  one slot.
Read next: ``keeping.py``, ``state_log.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hyradix.kernels.memory import upload
from hyradix.kernels.tree_recurrence.keeping import Moves, StateArrays
from hyradix.kernels.triton_support import (
    ceil_div,
    issue_loads,
    launch,
    load32,
    power_of_two,
)
from hyradix.kernels.triton_table import FoldConfig, fold_config

_CHANNELS = 1024
_STATE = 4096


@dataclass(frozen=True, slots=True)
class DeviceMoves:
    """``keeping.Moves`` as ``int32[J]`` tensors (taps ``int32[J, K-1]``); target 0 is padding."""

    sources: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor
    taps: torch.Tensor

    @classmethod
    def of(cls, moves: Moves, device: torch.device, *, padded_to: int = 0) -> DeviceMoves:
        """Copies on the device, with padding up to a length."""
        missing = max(padded_to - len(moves), 0)
        numbers = [
            np.concatenate([x, np.zeros((missing, *x.shape[1:]), np.int32)])
            for x in (moves.sources, moves.targets, moves.rows, moves.counts, moves.taps)
        ]
        return cls(*(upload(x, device) for x in numbers))


def fold_(arrays: StateArrays, moves: DeviceMoves, *, config: FoldConfig | None = None) -> None:
    """See ``keeping.fold``: recurrent ``[L, slots, Hv, K, V]``, k, u, g ``[L, N+1, R.., ...]``."""
    layers, _, num_v_heads, dk, dv = arrays.recurrent.shape
    num_moves, num_rows = moves.rows.shape[0], arrays.k.shape[2]
    config = config or fold_config(arrays.recurrent.device, num_moves)
    assert arrays.recurrent[0, 0].is_contiguous()
    for x in (arrays.k, arrays.u, arrays.g):
        assert x[0, 0].is_contiguous()
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ceil_div(dv, block_v)
    channels = arrays.windows.shape[3]
    per_layer = num_v_heads * blocks + ceil_div(channels, _CHANNELS)
    launch(
        _fold_kernel,
        (per_layer * layers, num_moves),
        arrays.recurrent, *arrays.recurrent.stride()[:2], arrays.windows,
        *arrays.windows.stride()[:2], arrays.conv, *arrays.conv.stride()[:2],
        arrays.k, *arrays.k.stride()[:2], arrays.u, *arrays.u.stride()[:2],
        arrays.g, *arrays.g.stride()[:2],
        moves.sources, moves.targets, moves.rows, moves.counts, moves.taps,
        channels, arrays.windows.shape[2], num_v_heads, num_v_heads // arrays.k.shape[3], dk, dv,
        num_rows, arrays.g.shape[4], power_of_two(dk), block_v,
        power_of_two(num_rows), power_of_two(arrays.g.shape[4]), _CHANNELS, blocks,
        config.stages, num_warps=config.num_warps,
    )  # fmt: skip


def copy_nodes_(arrays: StateArrays, moves: DeviceMoves) -> None:
    """See ``keeping.copy_nodes``: states ``[L, N+1, T, Hv, K, V]``; ``counts`` are the nodes."""
    layers, _, num_v_heads, dk, dv = arrays.recurrent.shape
    assert arrays.recurrent[0, 0].is_contiguous()
    assert arrays.states[0, 0].is_contiguous()
    channels, size = arrays.windows.shape[3], num_v_heads * dk * dv
    per_layer = ceil_div(size, _STATE) + ceil_div(channels, _CHANNELS)
    launch(
        _copy_nodes_kernel,
        (per_layer * layers, moves.rows.shape[0]),
        arrays.recurrent, *arrays.recurrent.stride()[:2], arrays.windows,
        *arrays.windows.stride()[:2], arrays.conv, *arrays.conv.stride()[:2],
        arrays.states, *arrays.states.stride()[:2],
        moves.sources, moves.targets, moves.rows, moves.counts, moves.taps,
        channels, arrays.windows.shape[2], size, _STATE, _CHANNELS,
    )  # fmt: skip


@triton.jit
def _fold_kernel(
    pool, pool_layer, pool_slot, windows, windows_layer, windows_slot, conv, conv_layer, conv_row,
    log_k, k_layer, k_row, log_u, u_layer, u_row, log_g, g_layer, g_row,
    sources, targets, rows, counts, taps,
    C: tl.constexpr, TAPS: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, R: tl.constexpr, DG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BR: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of a layer: its heads' column blocks, then the blocks of its window's channels."""
    PER_LAYER: tl.constexpr = HV * BLOCKS + (C + BC - 1) // BC
    move = tl.program_id(1)
    target = tl.load(targets + move).to(tl.int64)
    if target == 0:
        return
    layer = (tl.program_id(0) // PER_LAYER).to(tl.int64)
    part = tl.program_id(0) % PER_LAYER
    source = tl.load(sources + move).to(tl.int64)
    row = tl.load(rows + move).to(tl.int64)
    if part >= HV * BLOCKS:
        windows += layer * windows_layer
        conv += layer * conv_layer + row * conv_row
        first = (part - HV * BLOCKS) * BC
        _window(
            windows + source * windows_slot, windows + target * windows_slot, conv,
            taps + move * TAPS, first + tl.arange(0, BC), C, TAPS,
        )  # fmt: skip
        return
    count = tl.load(counts + move)
    head = part // BLOCKS
    d = tl.arange(0, BK)
    column = part % BLOCKS * BV + tl.arange(0, BV)
    in_k, in_v = d < DK, column < DV
    inside = in_k[:, None] & in_v[None, :]
    place = (head * DK + d[:, None]) * DV + column[None, :]
    pool += layer * pool_layer
    log_k += layer * k_layer + row * k_row + head // RATIO * DK
    log_u += layer * u_layer + row * u_row + head * DV
    log_g += layer * g_layer + row * g_row + head * DG
    base = load32(pool + source * pool_slot + place, inside)
    issue_loads()
    j = tl.arange(0, BR)
    if DG == 1:
        base *= tl.exp(tl.sum(load32(log_g + j * HV, j < count), 0))
        after = 0.0
    else:
        place_g = log_g + j[:, None] * (HV * DG) + d[None, :]
        g = load32(place_g, (j < count)[:, None] & in_k[None, :])
        base *= tl.exp(tl.sum(g, 0))[:, None]
        after = tl.zeros([BK], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        row_of = count - 1 - i  # the newest first, so that what follows it is known
        k = load32(log_k + row_of * (HV // RATIO * DK) + d, in_k) * tl.exp(after)
        u = load32(log_u + row_of * (HV * DV) + column, in_v)
        base += k[:, None] * u[None, :]
        if DG == 1:
            after += tl.load(log_g + row_of * HV)
        else:
            after += load32(log_g + row_of * (HV * DG) + d, in_k)
    tl.store(pool + target * pool_slot + place, base, mask=inside)


@triton.jit
def _window(old, new, columns, taps, channel, C: tl.constexpr, TAPS: tl.constexpr):
    """The target's window by taps: column c >= 0 of the row, or column -1 - c of the source's."""
    mask = channel < C
    t = tl.arange(0, triton.next_power_of_2(TAPS))
    tap = tl.load(taps + t, mask=t < TAPS, other=0)
    inside = (t < TAPS)[:, None] & mask[None, :]
    of_row = columns + tap[:, None] * C + channel[None, :]
    of_base = old + (-1 - tap)[:, None] * C + channel[None, :]
    value = load32(of_row, inside & (tap >= 0)[:, None])
    value += load32(of_base, inside & (tap < 0)[:, None])
    to = new + t[:, None] * C + channel[None, :]
    tl.debug_barrier()  # source and target may be one: all is read before anything is written
    tl.store(to, value.to(new.dtype.element_ty), mask=inside)


@triton.jit
def _copy_nodes_kernel(
    pool, pool_layer, pool_slot, windows, windows_layer, windows_slot, conv, conv_layer, conv_row,
    states, states_layer, states_row, sources, targets, rows, nodes, taps,
    C: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (SIZE + BS - 1) // BS
    PER_LAYER: tl.constexpr = PIECES + (C + BC - 1) // BC
    move = tl.program_id(1)
    target = tl.load(targets + move).to(tl.int64)
    if target == 0:
        return
    layer = (tl.program_id(0) // PER_LAYER).to(tl.int64)
    part = tl.program_id(0) % PER_LAYER
    row = tl.load(rows + move).to(tl.int64)
    if part >= PIECES:
        source = tl.load(sources + move).to(tl.int64)
        windows += layer * windows_layer
        conv += layer * conv_layer + row * conv_row
        first = (part - PIECES) * BC
        _window(
            windows + source * windows_slot, windows + target * windows_slot, conv,
            taps + move * TAPS, first + tl.arange(0, BC), C, TAPS,
        )  # fmt: skip
        return
    node = tl.load(nodes + move).to(tl.int64)
    i = part * BS + tl.arange(0, BS)
    source_state = states + layer * states_layer + row * states_row + node * SIZE
    value = tl.load(source_state + i, mask=i < SIZE, other=0.0)
    tl.store(pool + layer * pool_layer + target * pool_slot + i, value, mask=i < SIZE)

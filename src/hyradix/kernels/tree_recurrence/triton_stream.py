"""The launch of a decode step that reads states, all else having been done by the launch before.

Owns: ``StreamInputs`` and ``stream_``, which reads states (by a log), or reads and writes them (in
place). Does not know: families, convolution, gates.

With S the state, ' what the launch before folded in (decays of channels, log rows):
u = beta (v' - decay S^T k'), o = o' + decay S^T q' + (q k) u; in place S <- decay S + k u^T.
A log's rows are read here, as some more rows of the state, where heads decay as a whole
(``has_rows``); else the launch before has added them to v' and o'.

Invariants:
- A program asks for its block of the state first, while the launch before still runs: nothing in a
  step writes what it reads. What else it reads depends on no other load.
- Float32 throughout, sums without matrix units. By a log only u is appended; the count stays.
- Rows of the sink (slot 0) are padding: their output is zeros, nothing else is read or written.
Read next: ``rules.py`` (the meaning), ``triton_ready.py`` and
``../gated_delta_net/triton_prepared.py`` (the launch before).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_support import (
    ceil_div,
    issue_loads,
    launch,
    load32,
    power_of_two,
    silu,
    store,
    two_sums,
    wait_for_previous,
)
from hyradix.kernels.triton_table import StepConfig

_ROWS = tl.constexpr(8)
"""Of the log, at a time."""


class StreamInputs:
    """What a step's launches leave for each other; layers use it in turn.

    q, k: ``[N, Hk, dk]``. qk: ``[N, Hk]``, the product of both without decays. v, o: ``[N, Hv,
    dv]``, less and plus what the log's rows hold (without ``has_rows``). decay: ``[N, Hv]``, from
    what is read last, the state or the newest row, to now.
    """

    def __init__(
        self, max_batch: int, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_batch, *shape, device=device)

        self.q, self.k = (empty(num_k_heads, k_dim) for _ in "qk")
        self.qk = empty(num_k_heads)
        self.v, self.o = (empty(num_v_heads, v_dim) for _ in "vo")
        self.decay, self.beta = (empty(num_v_heads) for _ in "db")


@dataclass(frozen=True, slots=True)
class OutputNorm:
    """rms_norm(o) * silu(z) by value heads. z: ``[N, Hv dv]``, its rows dense."""

    z: torch.Tensor
    weight: torch.Tensor
    eps: float


def stream_(
    x: StreamInputs,
    slots: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    config: StepConfig,
    *,
    has_delta: bool = True,
    has_rows: bool = False,
    norm: OutputNorm | None = None,
    rows: torch.Tensor | None = None,
    log: SpecLayer | None = None,
    num_log_rows: torch.Tensor | None = None,
) -> None:
    """One token of each row: out ``[N, Hv dv]``, with ``norm`` if a program holds a whole head.

    Args: slots, rows, num_log_rows ``int32[N]``; state ``float32[slots, Hv, dk, dv]``; log: mode
    ``log``, None: in place. has_rows: the log's rows are not in x yet, and g is one of a head.
    """
    num_tokens, (_, num_v_heads, dk, dv) = slots.shape[0], state.shape
    assert state.is_contiguous()
    assert out.stride(1) == 1
    assert has_delta or not has_rows
    is_log = log is not None
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ceil_div(dv, block_v)
    assert norm is None or blocks == 1
    z = out if norm is None else norm.z
    block_k = min(config.block_k or power_of_two(dk), power_of_two(dk))
    is_read = is_log and has_rows
    launch(
        _stream_rows_kernel if config.block_k and is_log else _stream_kernel,
        (num_tokens * num_v_heads * blocks,),
        x.q, x.k, x.qk, x.v, x.o, x.decay, x.beta, slots, rows if is_log else slots,
        num_log_rows if is_log else slots, state, log.k if is_read else state,
        log.k.stride(0) if is_read else 0, log.u if is_log else state,
        log.u.stride(0) if is_log else 0, log.g if is_read else state,
        log.g.stride(0) if is_read else 0, out, out.stride(0), z, z.stride(0),
        out if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
        num_v_heads, num_v_heads // x.k.shape[1], dk, dv, log.num_log_rows if is_log else 0,
        power_of_two(dk), block_k, block_v, blocks, has_delta, is_log, is_read, norm is not None,
        config.stages, num_warps=config.num_warps, is_chained=True,
    )  # fmt: skip


@triton.jit
def _stream_kernel(
    all_q, all_k, all_qk, all_v, all_o, all_decay, all_beta, slots, rows, num_log_rows, state,
    log_k, k_stride, log_u, u_stride, log_g, g_stride, out, out_stride, z, z_stride, weight, eps,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    ALL_K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_DELTA: tl.constexpr, IS_LOG: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A block of the state's columns in registers."""
    head = tl.program_id(0) // BLOCKS % HV
    token = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    d, column = tl.arange(0, ALL_K), tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_k, in_v = d < DK, column < DV
    out += token * out_stride + head * DV + column
    slot = tl.load(slots + token).to(tl.int64)
    row, count = tl.load(rows + token).to(tl.int64), tl.load(num_log_rows + token)
    place = state + ((slot * HV + head) * DK + d[:, None]) * DV + column[None, :]
    inside = in_k[:, None] & in_v[None, :] & (slot != 0)
    base = load32(place, inside)
    issue_loads()
    wait_for_previous(CHAINED)
    if slot == 0:
        store(out, tl.zeros([BV], tl.float32), in_v)
        return
    k_head, v_head = token * (HV // RATIO) + head // RATIO, token * HV + head
    k = load32(all_k + k_head * DK + d, in_k)
    q = load32(all_q + k_head * DK + d, in_k)
    v, o = load32(all_v + v_head * DV + column, in_v), tl.zeros([BV], tl.float32)
    if IS_LOG and not HAS_ROWS:
        o = load32(all_o + v_head * DV + column, in_v)
    decay, beta = tl.load(all_decay + v_head), tl.load(all_beta + v_head)
    qk = tl.load(all_qk + k_head)
    if HAS_NORM:
        gate = load32(z + token * z_stride + head * DV + column, in_v)
        scale = load32(weight + column, in_v)
    issue_loads()
    log_u += row * u_stride + head * DV + column
    if HAS_ROWS:
        log_k += row * k_stride + head // RATIO * DK + d
        log_g += row * g_stride + head
        rows_k, o, decay = _read_rows(
            k, q, decay, log_k, log_u, log_g, count, in_k, in_v, HV // RATIO * DK, HV * DV, HV, BV
        )
        v -= rows_k
    read_k, read_q = two_sums(base, k[:, None], q[:, None], 0)
    u = beta * (v - decay * read_k) if HAS_DELTA else beta * v
    o += decay * read_q + qk * u
    if IS_LOG:
        tl.store(log_u + count * (HV * DV), u, mask=in_v & (count < R))
    else:
        store(place, base * decay + k[:, None] * u[None, :], inside)
    if HAS_NORM:
        o *= scale * silu(gate) / tl.sqrt(tl.sum(o * o, 0) / DV + eps)
    store(out, o, in_v)


@triton.jit
def _stream_rows_kernel(
    all_q, all_k, all_qk, all_v, all_o, all_decay, all_beta, slots, rows, num_log_rows, state,
    log_k, k_stride, log_u, u_stride, log_g, g_stride, out, out_stride, z, z_stride, weight, eps,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    ALL_K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_DELTA: tl.constexpr, IS_LOG: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """By a log: BK rows of d_k after the other, STAGES - 1 of them under way in shared memory."""
    head = tl.program_id(0) // BLOCKS % HV
    token = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    i, column = tl.arange(0, BK), tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    in_v = column < DV
    out += token * out_stride + head * DV + column
    slot = tl.load(slots + token).to(tl.int64)
    row, count = tl.load(rows + token).to(tl.int64), tl.load(num_log_rows + token)
    wait_for_previous(CHAINED)
    if slot == 0:
        store(out, tl.zeros([BV], tl.float32), in_v)
        return
    k_head, v_head = token * (HV // RATIO) + head // RATIO, token * HV + head
    place = state + (slot * HV + head) * (DK * DV) + i[:, None] * DV + column[None, :]
    read_k, read_q = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    v, o = load32(all_v + v_head * DV + column, in_v), tl.zeros([BV], tl.float32)
    if not HAS_ROWS:
        o = load32(all_o + v_head * DV + column, in_v)
    decay, beta = tl.load(all_decay + v_head), tl.load(all_beta + v_head)
    qk = tl.load(all_qk + k_head)
    if HAS_NORM:
        gate = load32(z + token * z_stride + head * DV + column, in_v)
        scale = load32(weight + column, in_v)
    all_k += k_head * DK
    all_q += k_head * DK
    log_u += row * u_stride + head * DV + column
    if HAS_ROWS:
        d = tl.arange(0, ALL_K)
        k, q = load32(all_k + d, d < DK), load32(all_q + d, d < DK)
        log_k += row * k_stride + head // RATIO * DK + d
        log_g += row * g_stride + head
        rows_k, o, decay = _read_rows(
            k, q, decay, log_k, log_u, log_g, count, d < DK, in_v, HV // RATIO * DK, HV * DV, HV, BV
        )
        v -= rows_k
    for first in tl.range(0, DK, BK, num_stages=STAGES):
        in_k = first + i < DK
        base = load32(place + first * DV, in_k[:, None] & in_v[None, :])
        read_k += tl.sum(base * load32(all_k + first + i, in_k)[:, None], 0)
        read_q += tl.sum(base * load32(all_q + first + i, in_k)[:, None], 0)
    u = beta * (v - decay * read_k) if HAS_DELTA else beta * v
    o += decay * read_q + qk * u
    tl.store(log_u + count * (HV * DV), u, mask=in_v & (count < R))
    if HAS_NORM:
        o *= scale * silu(gate) / tl.sqrt(tl.sum(o * o, 0) / DV + eps)
    store(out, o, in_v)


@triton.jit
def _read_rows(
    k, q, decay, log_k, log_u, log_g, count, in_k, in_v,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, G_ROW: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What k and q read of the log's ``count`` rows, and the decay from the base to now.

    decay: from the newest row to now. Newest rows first: the decays of a row are those of the rows
    behind it, which have been seen, multiplied; no sum is a difference.
    """
    i = tl.arange(0, _ROWS)
    read_k, read_q = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    blocks = tl.cdiv(count, _ROWS)
    for n in range(0, blocks):
        j = (blocks - 1 - n) * _ROWS + i
        is_row = j < count
        keys = load32(log_k[None, :] + j[:, None] * K_ROW, is_row[:, None] & in_k[None, :])
        us = load32(log_u[None, :] + j[:, None] * V_ROW, is_row[:, None] & in_v[None, :])
        g = load32(log_g + j * G_ROW, is_row)
        behind = tl.sum(tl.where(i[None, :] > i[:, None], g[None, :], 0.0), 1)
        at_k, at_q = two_sums(keys, k[None, :], q[None, :], 1)
        from_row = tl.exp(behind) * decay
        rows_k, rows_q = two_sums(us, (at_k * from_row)[:, None], (at_q * from_row)[:, None], 0)
        read_k += rows_k
        read_q += rows_q
        decay *= tl.exp(tl.sum(g, 0))
    return read_k, read_q, decay

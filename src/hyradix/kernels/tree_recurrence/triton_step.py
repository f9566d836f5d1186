"""One decode step of any of the recurrences by state slot: in place, or from a base and a log.

Owns: ``step_`` and ``log_step_`` on inputs that are ready (convolved, normed, gated). Does not
know: families' gates and norms; a family with a fused step uses that (``gated_delta_net``).

A program is one (row, value head, block of d_v columns).

Invariants:
- In place: states change at the rows' slots only. By a log: bases are only read; row
  ``num_log_rows[n]`` of the log is written, the count itself is not.
- Float32 throughout, sums without matrix units. Decays are sums of g from a row to the end.
- Rows of the sink (slot 0) are padding: their output is zeros, nothing else is written.
Read next: ``rules.py`` (the meaning), ``triton_keeping.py`` (folds).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_ready import ready_
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs, stream_
from hyradix.kernels.triton_support import (
    ceil_div,
    issue_loads,
    launch,
    load32,
    power_of_two,
    store,
)
from hyradix.kernels.triton_table import StepConfig, step_config


def step_(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    *,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """One token of each row, in place.

    Args: q, k ``[N, Hk, K]``, v ``[N, Hv, V]``, g ``[N, Hv, 1 or K]``, beta ``[N, Hv]``, as in
    ``rules.py``; a token's q, k and v may be parts of a longer row. slots ``int32[N]``. state
    ``float32[slots, Hv, K, V]``. out ``[N, Hv, V]``.
    """
    return _launch(rule, q, k, v, g, beta, slots, state, out, None, None, None, config)


def log_step_(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_log_rows: torch.Tensor,
    state: torch.Tensor,
    log: SpecLayer,
    inputs: StreamInputs,
    out: torch.Tensor,
    *,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """The same from base and log, one row appended; rows, num_log_rows ``int32[N]``, log: mode
    ``log`` (its columns are the convolution's business).

    inputs: between two launches, where the table says two (``triton_ready.py``).
    """
    config = config or step_config(state.device, slots.shape[0], is_log=True)
    if not config.is_fused:
        ready_(rule, q, k, v, g, beta, slots, rows, num_log_rows, log, inputs)
        stream_(
            inputs, slots, state, out.flatten(1), config, has_delta=rule.has_delta, rows=rows,
            num_log_rows=num_log_rows, log=log,
        )  # fmt: skip
        return out
    return _launch(rule, q, k, v, g, beta, slots, state, out, rows, num_log_rows, log, config)


def _launch(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    num_log_rows: torch.Tensor | None,
    log: SpecLayer | None,
    config: StepConfig | None,
) -> torch.Tensor:
    num_tokens, num_k_heads, dk = k.shape
    num_v_heads, dv = v.shape[1:]
    for x in (g, beta, state, out):
        assert x.is_contiguous()
    for x in (q, k, v):
        assert x.stride()[1:] == (x.shape[2], 1)
    config = config or step_config(state.device, num_tokens, is_log=log is not None)
    block_v = min(config.block_v, power_of_two(dv))
    blocks = ceil_div(dv, block_v)
    arrays = (k, v, g) if log is None else (log.k, log.u, log.g)
    num_rows = 1 if log is None else log.num_log_rows
    launch(
        _step_kernel,
        (num_tokens * num_v_heads * blocks,),
        q, q.stride(0), k, k.stride(0), v, v.stride(0), g, beta, slots,
        slots if rows is None else rows, slots if num_log_rows is None else num_log_rows, state,
        arrays[0], arrays[0].stride(0), arrays[1], arrays[1].stride(0),
        arrays[2], arrays[2].stride(0), out,
        num_v_heads, num_v_heads // num_k_heads, dk, dv, g.shape[2], num_rows, power_of_two(dk),
        block_v, power_of_two(num_rows), blocks, rule.has_delta, log is not None,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _step_kernel(
    all_q, q_token, all_k, k_token, all_v, v_token, all_g, all_beta, slots, rows, num_log_rows,
    state, log_k, k_stride, log_u, u_stride, log_g, g_stride, out,
    HV: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DG: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_DELTA: tl.constexpr, IS_LOG: tl.constexpr,
):  # fmt: skip
    """DG: 1, or DK where each channel of k decays by itself."""
    HK: tl.constexpr = HV // RATIO
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % HV
    token = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    d, column = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    in_k, in_v = d < DK, column < DV
    o_place = out + (token * HV + head) * DV + column
    slot = tl.load(slots + token).to(tl.int64)
    if slot == 0:
        tl.store(o_place, tl.zeros([BV], out.dtype.element_ty), mask=in_v)
        return
    place = state + ((slot * HV + head) * DK + d[:, None]) * DV + column[None, :]
    inside = in_k[:, None] & in_v[None, :]
    base = load32(place, inside)  # all else is done while it comes
    issue_loads()
    dg = d if DG > 1 else d * 0
    q = load32(all_q + token * q_token + head // RATIO * DK + d, in_k)
    k = load32(all_k + token * k_token + head // RATIO * DK + d, in_k)
    v = load32(all_v + token * v_token + head * DV + column, in_v)
    g = load32(all_g + (token * HV + head) * DG + dg, in_k)
    beta = tl.load(all_beta + token * HV + head).to(tl.float32)
    if IS_LOG:
        row = tl.load(rows + token).to(tl.int64)
        count = tl.load(num_log_rows + token)
        log_k += row * k_stride + head // RATIO * DK
        log_u += row * u_stride + head * DV
        log_g += row * g_stride + head * DG
        j = tl.arange(0, BR)
        is_row = j < count
        u_inside = is_row[:, None] & in_v[None, :]
        k_inside = is_row[:, None] & in_k[None, :]
        us = load32(log_u + j[:, None] * (HV * DV) + column[None, :], u_inside)
        keys = load32(log_k + j[:, None] * (HK * DK) + d[None, :], k_inside)
        if DG > 1:
            place_g = log_g + j[:, None] * (HV * DG) + d[None, :]
            later = load32(place_g + HV * DG, (j[:, None] + 1 < count) & in_k[None, :])
            # from a row to this token, by channel
            keys *= tl.exp(tl.cumsum(later, 0, reverse=True) + g[None, :])
            first = load32(log_g + d, in_k & (count > 0))
            whole, ratio = first + tl.sum(later, 0), tl.where(is_row, 1.0, 0.0)
        else:
            row_g = load32(log_g + j * HV, is_row)
            one_g = tl.load(all_g + token * HV + head).to(tl.float32)
            after = tl.sum(tl.where(j[None, :] > j[:, None], row_g[None, :], 0.0), 1)
            whole, ratio = tl.sum(row_g, 0), tl.where(is_row, tl.exp(after + one_g), 0.0)
        state_now = base * tl.exp(g + whole)[:, None]
        k_keys, q_keys = tl.sum(keys * k[None, :], 1) * ratio, tl.sum(keys * q[None, :], 1) * ratio
        read = tl.sum(state_now * k[:, None], 0) + tl.sum(us * k_keys[:, None], 0)
        o = tl.sum(state_now * q[:, None], 0) + tl.sum(us * q_keys[:, None], 0)
        u = beta * (v - read) if HAS_DELTA else beta * v
        o += tl.sum(q * k, 0) * u
        if count < R:
            tl.store(log_u + count * (HV * DV) + column, u, mask=in_v)
            tl.store(log_g + count * (HV * DG) + dg, g, mask=in_k & (block == 0))
            is_first = (block == 0) & (head % RATIO == 0)
            tl.store(log_k + count * (HK * DK) + d, k, mask=in_k & is_first)
    else:
        decayed = base * tl.exp(g)[:, None]
        u = beta * v
        if HAS_DELTA:
            u -= beta * tl.sum(decayed * k[:, None], 0)
        new = decayed + k[:, None] * u[None, :]
        o = tl.sum(new * q[:, None], 0)
        store(place, new, inside)
    tl.store(o_place, o.to(out.dtype.element_ty), mask=in_v)

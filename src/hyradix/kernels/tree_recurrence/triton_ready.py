"""What a decode step by a log has ready before it reads states, for any of the recurrences.

Owns: ``ready_``: of inputs that are convolved, normed and gated, the decays and all that a log's
rows add; the row's k and g. Does not know: families (``gated_delta_net`` does all of it in the
launch of its convolution), states.

Invariants:
- Decays are sums of g from a row to the end. Rows past a count are not read.
- Row ``num_log_rows[n]`` of the log's k and g is written, the count itself is not.
- Of rows of the sink (slot 0) nothing is read or written.
Read next: ``triton_stream.py`` (the launch that follows).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.tree_recurrence.rules import Rule
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.triton_stream import StreamInputs
from hyradix.kernels.triton_support import issue_loads, launch, load32, power_of_two, two_sums


def ready_(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    num_log_rows: torch.Tensor,
    log: SpecLayer,
    x: StreamInputs,
) -> None:
    """Fill ``x`` and append k and g; the arguments as in ``triton_step.log_step_``.

    Where channels decay by themselves ``x`` has q and k of every value head.
    """
    num_tokens, num_k_heads, dk = k.shape
    num_v_heads, dv = v.shape[1:]
    dg, filled = g.shape[2], x.k.shape[1]
    assert filled == num_v_heads if dg > 1 else filled == num_k_heads
    launch(
        _ready_kernel,
        (num_tokens, num_v_heads),
        q, q.stride(0), k, k.stride(0), v, v.stride(0), g, beta, slots, rows, num_log_rows,
        log.k, log.k.stride(0), log.u, log.u.stride(0), log.g, log.g.stride(0),
        x.q, x.k, x.qk, x.v, x.o, x.decay, x.beta,
        num_v_heads, num_v_heads // num_k_heads, num_v_heads // filled, dk, dv, dg,
        log.num_log_rows, power_of_two(dk), power_of_two(dv), power_of_two(log.num_log_rows),
        rule.has_delta,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _ready_kernel(
    all_q, q_token, all_k, k_token, all_v, v_token, all_g, all_beta, slots, rows, num_log_rows,
    log_k, k_stride, log_u, u_stride, log_g, g_stride,
    ready_q, ready_k, ready_qk, ready_v, ready_o, ready_decay, ready_beta,
    HV: tl.constexpr, RATIO: tl.constexpr, SHARED: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DG: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BR: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """One token and value head; the first of SHARED heads writes what they share."""
    HK: tl.constexpr = HV // RATIO
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, row = tl.load(slots + token), tl.load(rows + token).to(tl.int64)
    count = tl.load(num_log_rows + token)
    issue_loads()
    if slot == 0:
        return
    d, c, j = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BR)
    in_k, in_v, is_row = d < DK, c < DV, j < count
    k_inside = is_row[:, None] & in_k[None, :]
    log_k += row * k_stride + head // RATIO * DK + d
    log_u += row * u_stride + head * DV + c
    log_g += row * g_stride + head * DG
    v_head = token * HV + head
    keys = load32(log_k + j[:, None] * (HK * DK), k_inside)
    us = load32(log_u + j[:, None] * (HV * DV), is_row[:, None] & in_v[None, :])
    q = load32(all_q + token * q_token + head // RATIO * DK + d, in_k)
    k = load32(all_k + token * k_token + head // RATIO * DK + d, in_k)
    v = load32(all_v + token * v_token + head * DV + c, in_v)
    if DG > 1:
        g = load32(all_g + v_head * DG + d, in_k)
        row_g = load32(log_g + j[:, None] * (HV * DG) + d[None, :], k_inside)
        later_inside = (j[:, None] + 1 < count) & in_k[None, :]
        later = load32(log_g + (j[:, None] + 1) * (HV * DG) + d[None, :], later_inside)
        issue_loads()
        keys *= tl.exp(tl.cumsum(later, 0, reverse=True) + g[None, :])
        decays, decay, from_row = tl.exp(g + tl.sum(row_g, 0)), 1.0, 1.0
    else:
        g = tl.load(all_g + v_head)
        row_g = load32(log_g + j * HV, is_row)
        issue_loads()
        after = tl.sum(tl.where(j[None, :] > j[:, None], row_g[None, :], 0.0), 1)
        decays, decay, from_row = 1.0, tl.exp(g + tl.sum(row_g, 0)), tl.exp(after + g)
    at_k, at_q = two_sums(keys, k[None, :], q[None, :], 1)
    row_k, row_q = two_sums(us, (at_k * from_row)[:, None], (at_q * from_row)[:, None], 0)
    tl.store(ready_v + v_head * DV + c, v - row_k if HAS_DELTA else v, mask=in_v)
    tl.store(ready_o + v_head * DV + c, row_q, mask=in_v)
    tl.store(ready_decay + v_head, decay)
    tl.store(ready_beta + v_head, tl.load(all_beta + v_head))
    if head % SHARED == 0:
        place = v_head // SHARED
        tl.store(ready_q + place * DK + d, q * decays, mask=in_k)
        tl.store(ready_k + place * DK + d, k * decays, mask=in_k)
        tl.store(ready_qk + place, tl.sum(q * k, 0))
    if count < R:
        if head % RATIO == 0:
            tl.store(log_k + count * (HK * DK), k, mask=in_k)
        if DG > 1:
            tl.store(log_g + count * (HV * DG) + d, g, mask=in_k)
        else:
            tl.store(log_g + count * HV, g)

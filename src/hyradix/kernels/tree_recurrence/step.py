"""One token of the recurrence, compiled: the arithmetic that decode, verify and replay share.

Owns: S <- D(g) S + k u^T and o = S^T q for one head, under the two switches of ``rules.Rule``.
Does not know: slots, trees, projections.

Invariants:
- Whoever runs a token through here gets the same bits: the state may come from one array and go to
  another, the output may be wanted or not.
- A head's state is [K, V] at a flat place; sixteen columns at a time, their sums in registers.
Read next: ``rules.py`` (the readable twin).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import math

import numpy as np

from hyradix.kernels.numba_support import compiled, exp32
from hyradix.kernels.simd import LANES, at, vadd, vfma, vmul, vset
from hyradix.kernels.simd_rows import load, store

_ZERO = np.float32(0.0)


@compiled(inline=True)
def head_decay(g):
    """e^g of a head with one decay."""
    return np.float32(math.exp(g))


@compiled()
def channel_decays(g, place, size, decays):
    """decays[:size] = e^g of a head with one decay per channel of k."""
    for i in range(size):
        decays[i] = exp32(at(g, place + i))


@compiled()
def step_head(source, s, target, t, x, q, k, v, decay, beta, dk, dv, has_delta, out, o):
    """A token with one decay: S at source.flat[s:] -> target.flat[t:]; out[o:] = S^T q.

    q, k, v are places in ``x``; q < 0: no output is wanted. Without delta u = beta v.
    """
    keep, rate, minus = vset(decay), vset(beta), vset(-decay)
    for c in range(0, dv, LANES):
        count = dv - c
        u = vmul(rate, load(x, v + c, count))
        if has_delta:
            m0, m1 = vset(_ZERO), vset(_ZERO)
            for i in range(0, dk - 1, 2):
                p = s + i * dv + c
                m0 = vfma(load(source, p, count), vset(at(x, k + i)), m0)
                m1 = vfma(load(source, p + dv, count), vset(at(x, k + i + 1)), m1)
            if dk % 2:
                p = s + (dk - 1) * dv + c
                m0 = vfma(load(source, p, count), vset(at(x, k + dk - 1)), m0)
            u = vmul(rate, vfma(minus, vadd(m0, m1), load(x, v + c, count)))
        if q < 0:
            for i in range(dk):
                value = vmul(keep, load(source, s + i * dv + c, count))
                store(target, t + i * dv + c, vfma(vset(at(x, k + i)), u, value), count)
            continue
        total = vset(_ZERO)
        for i in range(dk):
            value = vmul(keep, load(source, s + i * dv + c, count))
            value = vfma(vset(at(x, k + i)), u, value)
            store(target, t + i * dv + c, value, count)
            total = vfma(value, vset(at(x, q + i)), total)
        store(out, o + c, total, count)


@compiled()
def step_channels(source, s, target, t, x, q, k, v, decays, beta, dk, dv, has_delta, out, o):
    """``step_head`` with a decay per channel of k: ``decays`` as ``channel_decays`` left them."""
    rate = vset(beta)
    for c in range(0, dv, LANES):
        count = dv - c
        u = vmul(rate, load(x, v + c, count))
        if has_delta:
            m0, m1 = vset(_ZERO), vset(_ZERO)
            for i in range(0, dk - 1, 2):
                p = s + i * dv + c
                k0, k1 = at(x, k + i) * decays[i], at(x, k + i + 1) * decays[i + 1]
                m0 = vfma(load(source, p, count), vset(-k0), m0)
                m1 = vfma(load(source, p + dv, count), vset(-k1), m1)
            if dk % 2:
                p = s + (dk - 1) * dv + c
                k0 = at(x, k + dk - 1) * decays[dk - 1]
                m0 = vfma(load(source, p, count), vset(-k0), m0)
            u = vmul(rate, vadd(vadd(m0, m1), load(x, v + c, count)))
        total = vset(_ZERO)
        for i in range(dk):
            value = vmul(vset(decays[i]), load(source, s + i * dv + c, count))
            value = vfma(vset(at(x, k + i)), u, value)
            store(target, t + i * dv + c, value, count)
            if q >= 0:
                total = vfma(value, vset(at(x, q + i)), total)
        if q >= 0:
            store(out, o + c, total, count)

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
from hyradix.kernels.simd import LANES, at, vadd, vfma, vload, vmul, vset, vstore
from hyradix.kernels.simd_rows import load, store

_ZERO = np.float32(0.0)
_FADED = np.float32(-80.0)


@compiled(inline=True)
def head_decay(g):
    """e^g of a head with one decay."""
    return np.float32(math.exp(g))


@compiled(inline=True)
def fading(x):
    """e^x for x <= 0; 0 where what is left would make denormal numbers, which are slow."""
    return _ZERO if x < _FADED else exp32(x)


@compiled()
def channel_decays(g, place, size, decays):
    """decays[:size] = e^g of a head with one decay per channel of k."""
    for i in range(size):
        decays[i] = exp32(at(g, place + i))


@compiled()
def _wide_columns(
    source, s, target, t, x, q, k, v, decay, beta, dk, dv, has_delta, out, o
):  # fmt: skip
    """Sixty-four columns of ``step_head``: four sixteens side by side, each as it is alone."""
    keep, rate, minus = vset(decay), vset(beta), vset(-decay)
    a0, a1, a2, a3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    b0, b1, b2, b3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    if has_delta:
        for i in range(0, dk - 1, 2):
            p, by = s + i * dv, vset(at(x, k + i))
            a0, a1 = vfma(vload(source, p), by, a0), vfma(vload(source, p + 16), by, a1)
            a2, a3 = vfma(vload(source, p + 32), by, a2), vfma(vload(source, p + 48), by, a3)
            p, by = p + dv, vset(at(x, k + i + 1))
            b0, b1 = vfma(vload(source, p), by, b0), vfma(vload(source, p + 16), by, b1)
            b2, b3 = vfma(vload(source, p + 32), by, b2), vfma(vload(source, p + 48), by, b3)
        if dk % 2:
            p, by = s + (dk - 1) * dv, vset(at(x, k + dk - 1))
            a0, a1 = vfma(vload(source, p), by, a0), vfma(vload(source, p + 16), by, a1)
            a2, a3 = vfma(vload(source, p + 32), by, a2), vfma(vload(source, p + 48), by, a3)
    u0 = vmul(rate, vfma(minus, vadd(a0, b0), vload(x, v)))
    u1 = vmul(rate, vfma(minus, vadd(a1, b1), vload(x, v + 16)))
    u2 = vmul(rate, vfma(minus, vadd(a2, b2), vload(x, v + 32)))
    u3 = vmul(rate, vfma(minus, vadd(a3, b3), vload(x, v + 48)))
    o0, o1, o2, o3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    for i in range(dk):
        p, place, by = s + i * dv, t + i * dv, vset(at(x, k + i))
        s0 = vfma(by, u0, vmul(keep, vload(source, p)))
        s1 = vfma(by, u1, vmul(keep, vload(source, p + 16)))
        s2 = vfma(by, u2, vmul(keep, vload(source, p + 32)))
        s3 = vfma(by, u3, vmul(keep, vload(source, p + 48)))
        vstore(target, place, s0)
        vstore(target, place + 16, s1)
        vstore(target, place + 32, s2)
        vstore(target, place + 48, s3)
        if q >= 0:
            by = vset(at(x, q + i))
            o0, o1, o2, o3 = vfma(s0, by, o0), vfma(s1, by, o1), vfma(s2, by, o2), vfma(s3, by, o3)
    if q >= 0:
        vstore(out, o, o0)
        vstore(out, o + 16, o1)
        vstore(out, o + 32, o2)
        vstore(out, o + 48, o3)


@compiled()
def step_head(source, s, target, t, x, q, k, v, decay, beta, dk, dv, has_delta, out, o):
    """A token with one decay: S at source.flat[s:] -> target.flat[t:]; out[o:] = S^T q.

    q, k, v are places in ``x``; q < 0: no output is wanted. Without delta u = beta v.
    """
    keep, rate, minus = vset(decay), vset(beta), vset(-decay)
    wide = dv - dv % 64
    for c in range(0, wide, 64):
        _wide_columns(source, s + c, target, t + c, x, q, k, v + c, decay, beta, dk, dv, has_delta,
                      out, o + c)  # fmt: skip
    for c in range(wide, dv, LANES):
        count = dv - c
        m0, m1 = vset(_ZERO), vset(_ZERO)
        if has_delta:
            for i in range(0, dk - 1, 2):
                p = s + i * dv + c
                m0 = vfma(load(source, p, count), vset(at(x, k + i)), m0)
                m1 = vfma(load(source, p + dv, count), vset(at(x, k + i + 1)), m1)
            if dk % 2:
                p = s + (dk - 1) * dv + c
                m0 = vfma(load(source, p, count), vset(at(x, k + dk - 1)), m0)
        u = vmul(rate, vfma(minus, vadd(m0, m1), load(x, v + c, count)))
        total = vset(_ZERO)
        for i in range(dk):
            value = vmul(keep, load(source, s + i * dv + c, count))
            value = vfma(vset(at(x, k + i)), u, value)
            store(target, t + i * dv + c, value, count)
            if q >= 0:
                total = vfma(value, vset(at(x, q + i)), total)
        if q >= 0:
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

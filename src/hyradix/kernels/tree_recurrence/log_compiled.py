"""Mode ``log`` for one draft tree and one group of heads, compiled: no node state at all.

Owns: u and o of each node from the base, the log rows and its ancestors; the rows it leaves.
Does not know: families; the layout of their nodes is ``layer_compiled``'s.

Nodes are solved in their own order, ancestors first, which is exact: u_i = beta_i (v_i -
e^(G_i) S_0^T k_i - sum over ancestors j of (k_i . k_j) e^(G_i - G_j) u_j).

Invariants: the base is read once, for all nodes; G is summed in float64 and used in ratios
e^(G_i - G_j) only; the pool is not written.
Read next: ``masked.py`` (the readable twin).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled
from hyradix.kernels.simd import LANES, at, put, vfma, vmul, vset, vsum
from hyradix.kernels.simd_rows import copy, load, store
from hyradix.kernels.tree_recurrence.step import fading

_ZERO = np.float32(0.0)


@compiled()
def _read_base(state, base, mixed, stride, count, dk, dv, decays, width, reads):
    """reads[2 node] = (D(G) S)^T k, reads[2 node + 1] = (D(G) S)^T q: ``[2 nodes, dv]``.

    S is at flat ``base``; decays ``[nodes, 1 or dk]`` are e^G. Four nodes share a load of S.
    """
    scaled = np.empty(8 * dk, np.float32)
    for node in range(0, count, 4):
        few = min(4, count - node)
        scaled[:] = _ZERO
        for n in range(few):
            x = (node + n) * stride
            for i in range(dk):
                factor = decays[(node + n) * width + (i if width > 1 else 0)]
                scaled[(2 * n) * dk + i] = at(mixed, x + dk + i) * factor
                scaled[(2 * n + 1) * dk + i] = at(mixed, x + i) * factor
        for c in range(0, dv, LANES):
            left = dv - c
            k0, k1, k2, k3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
            q0, q1, q2, q3 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
            for i in range(dk):
                s = load(state, base + i * dv + c, left)
                k0 = vfma(s, vset(at(scaled, i)), k0)
                q0 = vfma(s, vset(at(scaled, dk + i)), q0)
                k1 = vfma(s, vset(at(scaled, 2 * dk + i)), k1)
                q1 = vfma(s, vset(at(scaled, 3 * dk + i)), q1)
                k2 = vfma(s, vset(at(scaled, 4 * dk + i)), k2)
                q2 = vfma(s, vset(at(scaled, 5 * dk + i)), q2)
                k3 = vfma(s, vset(at(scaled, 6 * dk + i)), k3)
                q3 = vfma(s, vset(at(scaled, 7 * dk + i)), q3)
            place = 2 * node * dv + c
            store(reads, place, k0, left)
            store(reads, place + dv, q0, left)
            if few > 1:
                store(reads, place + 2 * dv, k1, left)
                store(reads, place + 3 * dv, q1, left)
            if few > 2:
                store(reads, place + 4 * dv, k2, left)
                store(reads, place + 5 * dv, q2, left)
            if few > 3:
                store(reads, place + 6 * dv, k3, left)
                store(reads, place + 7 * dv, q3, left)


@compiled()
def _path_sums(log_g, row, num_rows, head, g, r, ratio, parents, first, count, width, sums):
    """G float64 ``[rows, then nodes, 1 or dk]`` of one head: from the base on along the path."""
    num_heads = log_g.shape[2]
    for j in range(num_rows):
        place = ((row * log_g.shape[1] + j) * num_heads + head) * width
        for d in range(width):
            before = sums[(j - 1) * width + d] if j > 0 else 0.0
            sums[j * width + d] = before + np.float64(at(log_g, place + d))
    for node in range(count):
        above = num_rows + np.int64(parents[first + node])  # of a root: the last log row
        if parents[first + node] < 0:
            above = num_rows - 1
        target, place = (num_rows + node) * width, (node * ratio + r) * width
        for d in range(width):
            before = sums[above * width + d] if above >= 0 else 0.0
            sums[target + d] = before + np.float64(at(g, place + d))


@compiled()
def _ratios(sums, own, order, length, ratios):
    """ratios[j] = e^(G_own - G_order[j]) for heads with one decay."""
    grown = at(sums, own)
    for j in range(length):
        put(ratios, j, np.float32(grown - at(sums, at(order, j))))
    for j in range(length):
        ratios[j] = fading(ratios[j])


@compiled()
def _products(mixed, x, keys, rows, length, stride, place, dk, kk, qk):
    """kk[j] = k . k_j, qk[j] = q . k_j of a node at ``x``; two keys at a time hide latency.

    k_j is at keys.flat[rows[j] stride + place].
    """
    for j in range(0, length, 2):
        p0 = at(rows, j) * stride + place
        p1 = at(rows, min(j + 1, length - 1)) * stride + place
        k0, k1, q0, q1 = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        for c in range(0, dk, LANES):
            left = dk - c
            first, second = load(keys, p0 + c, left), load(keys, p1 + c, left)
            k, q = load(mixed, x + dk + c, left), load(mixed, x + c, left)
            k0, q0 = vfma(k, first, k0), vfma(q, first, q0)
            k1, q1 = vfma(k, second, k1), vfma(q, second, q1)
        put(kk, j, vsum(k0))
        put(qk, j, vsum(q0))
        if j + 1 < length:
            put(kk, j + 1, vsum(k1))
            put(qk, j + 1, vsum(q1))


@compiled()
def _channel_products(mixed, x, log_k, place, sums, own, other, dk, decays):
    """(k . k_j, q . k_j) of a node at ``x``, each channel decayed from j to the node."""
    for d in range(dk):
        decays[d] = np.float32(sums[own * dk + d] - sums[other * dk + d])
    kk, qk = _ZERO, _ZERO
    for d in range(dk):
        decayed = at(log_k, place + d) * fading(decays[d])
        qk += at(mixed, x + d) * decayed
        kk += at(mixed, x + dk + d) * decayed
    return kk, qk


@compiled()
def _solve_node(
    reads, node, mixed, v, beta, by_k, by_q, places, length, log_u, own, dv, has_delta, o, place
):  # fmt: skip
    """u of a node to log_u[own:], and o[place:]; ``length`` ancestors, the last one itself.

    by_k, by_q: how much of each ancestor's u its k and q see (by_k with a minus).
    """
    rate = vset(beta)
    for c in range(0, dv, LANES):
        left = dv - c
        right, total = load(mixed, v + c, left), load(reads, (2 * node + 1) * dv + c, left)
        if has_delta:
            right = vfma(vset(np.float32(-1.0)), load(reads, 2 * node * dv + c, left), right)
        for j in range(length - 1):
            u = load(log_u, at(places, j) + c, left)
            right = vfma(vset(at(by_k, j)), u, right)
            total = vfma(vset(at(by_q, j)), u, total)
        u = vmul(rate, right)
        store(log_u, own + c, u, left)
        store(o, place + c, vfma(vset(at(by_q, length - 1)), u, total), left)


@compiled()
def solve(
    parents, path_offsets, path_nodes, first, count, state, slot, row, num_rows, log_size, group,
    ratio, mixed, stride, g, beta, log_k, log_u, log_g, has_delta, o,
):  # fmt: skip
    """All nodes of a tree: o, and their rows k, u, g at row numbers ``log_size`` + node.

    log_k ``[N+1, R+T, Hk, dk]``, log_u ``[.., Hv, dv]``, log_g ``[.., Hv, 1 or dk]``: the first
    ``num_rows`` rows are ancestors of every node.
    """
    num_heads, dk, dv = state.shape[1:]
    capacity, num_k_heads, width = log_k.shape[1], log_k.shape[2], log_g.shape[3]
    for node in range(count):
        own = row * capacity + log_size + node
        copy(mixed, node * stride + dk, log_k, (own * num_k_heads + group) * dk, dk)
        lane = own * num_heads + group * ratio
        copy(g, node * ratio * width, log_g, lane * width, ratio * width)
    total = num_rows + count
    sums = np.empty(ratio * total * width, np.float64)
    grown = np.empty(count * width, np.float32)
    reads = np.empty(ratio * 2 * count * dv, np.float32)
    for r in range(ratio):
        head = group * ratio + r
        part = sums[r * total * width : (r + 1) * total * width]
        _path_sums(log_g, row, num_rows, head, g, r, ratio, parents, first, count, width, part)
        for i in range(count * width):
            grown[i] = fading(np.float32(part[num_rows * width + i]))
        _read_base(state, (slot * num_heads + head) * dk * dv, mixed, stride, count, dk, dv, grown,
                   width, reads[r * 2 * count * dv :])  # fmt: skip
    kk, qk = np.empty(total, np.float32), np.empty(total, np.float32)
    by_k, by_q = np.empty(total, np.float32), np.empty(total, np.float32)
    ratios, decays = np.ones(total, np.float32), np.empty(dk, np.float32)
    order, rows, places = (np.empty(total, np.int64), np.empty(total, np.int64),
                           np.empty(total, np.int64))  # fmt: skip
    for j in range(num_rows):
        order[j], rows[j] = j, row * capacity + j
    for node in range(count):
        begin, end = path_offsets[first + node], path_offsets[first + node + 1]
        length = num_rows + end - begin
        for j in range(begin, end):
            ancestor = np.int64(path_nodes[j])
            order[num_rows + j - begin] = num_rows + ancestor
            rows[num_rows + j - begin] = row * capacity + log_size + ancestor
        x = node * stride
        if width == 1:
            _products(mixed, x, log_k, rows, length, num_k_heads * dk, group * dk, dk, kk, qk)
        for r in range(ratio):
            head = group * ratio + r
            part = sums[r * total * width : (r + 1) * total * width]
            if width == 1:
                _ratios(part, num_rows + node, order, length, ratios)
            for j in range(length):
                put(places, j, (at(rows, j) * num_heads + head) * dv)
                if width > 1:
                    kk[j], qk[j] = _channel_products(
                        mixed, x, log_k, (rows[j] * num_k_heads + group) * dk, part,
                        num_rows + node, order[j], dk, decays,
                    )  # fmt: skip
            sees = np.float32(-1.0 if has_delta else 0.0)
            for j in range(length):
                put(by_k, j, sees * at(kk, j) * at(ratios, j))
                put(by_q, j, at(qk, j) * at(ratios, j))
            lane = node * ratio + r
            _solve_node(reads[r * 2 * count * dv :], node, mixed, x + 2 * dk + r * dv,
                        at(beta, lane), by_k, by_q, places, length, log_u, places[length - 1], dv,
                        has_delta, o, lane * dv)  # fmt: skip

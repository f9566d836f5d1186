"""The recurrence over one draft tree and one group of heads, compiled, for every family.

Owns: the order in which nodes are computed and where their states and inputs go (``snapshot`` and
``replay``). Does not know: projections, gates, norms (a family's ``tree_compiled.py``).

A family's task lays out its nodes as ``mixed``: node i has q, k and the group's v at flat places
i * stride + 0, + dk, + 2 dk; and ``gates``: g of node i and head r of the group at flat
(i * ratio + r) * (1 or dk), beta at i * ratio + r. What comes back is o, ``[nodes, ratio dv]``.

Invariants: a node is one ``step.py`` token from its parent's state: the bits of plain decode. The
pool is only read.
Read next: ``layer_reference.py`` (the readable twin), ``log_compiled.py`` (mode ``log``).
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np

from hyradix.kernels.numba_support import compiled
from hyradix.kernels.simd import at, put
from hyradix.kernels.simd_rows import copy
from hyradix.kernels.tree_recurrence.step import (
    channel_decays,
    head_decay,
    step_channels,
    step_head,
)


@compiled()
def walk(
    parents, first, count, state, slot, states, row, group, ratio, mixed, stride, g, beta,
    has_delta, has_channel_decay, o,
):  # fmt: skip
    """Every node from its parent's state in ``states``, a root from the pool's slot.

    parents: of all trees, this one's from ``first`` on. state: ``[slots, Hv, dk, dv]``. states:
    ``[N+1, T, Hv, dk, dv]``.
    """
    num_heads, dk, dv = state.shape[1:]
    size = dk * dv
    decays = np.empty(dk, np.float32)
    for r in range(ratio):
        head = group * ratio + r
        base = (slot * num_heads + head) * size
        for node in range(count):
            target = ((row * states.shape[1] + node) * num_heads + head) * size
            parent = np.int64(parents[first + node])
            source = ((row * states.shape[1] + parent) * num_heads + head) * size
            x, lane = node * stride, node * ratio + r
            v, place = x + 2 * dk + r * dv, lane * dv
            if has_channel_decay:
                channel_decays(g, lane * dk, dk, decays)
                if parent < 0:
                    step_channels(state, base, states, target, mixed, x, x + dk, v, decays,
                                  at(beta, lane), dk, dv, has_delta, o, place)  # fmt: skip
                else:
                    step_channels(states, source, states, target, mixed, x, x + dk, v, decays,
                                  at(beta, lane), dk, dv, has_delta, o, place)  # fmt: skip
                continue
            decay, rate = head_decay(at(g, lane)), at(beta, lane)
            if parent < 0:
                step_head(state, base, states, target, mixed, x, x + dk, v, decay, rate, dk, dv,
                          has_delta, o, place)  # fmt: skip
            else:
                step_head(states, source, states, target, mixed, x, x + dk, v, decay, rate, dk, dv,
                          has_delta, o, place)  # fmt: skip


@compiled()
def hold_inputs(
    count, row, group, ratio, dk, dv, mixed, stride, g, beta, held_k, held_v, held_g, held_beta
):  # fmt: skip
    """What ``replay`` holds of every node: k, v, g, beta ``[N+1, T, heads, ...]`` of the group."""
    num_k_heads, num_v_heads = held_k.shape[2], held_v.shape[2]
    width = held_g.shape[3]
    for node in range(count):
        token, x = row * held_k.shape[1] + node, node * stride
        copy(mixed, x + dk, held_k, (token * num_k_heads + group) * dk, dk)
        lane = token * num_v_heads + group * ratio
        copy(mixed, x + 2 * dk, held_v, lane * dv, ratio * dv)
        copy(g, node * ratio * width, held_g, lane * width, ratio * width)
        for r in range(ratio):
            put(held_beta, lane + r, at(beta, node * ratio + r))

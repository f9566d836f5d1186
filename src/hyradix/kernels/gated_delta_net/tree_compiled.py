"""The mixer of a gated delta net over draft trees, compiled: one task per (tree, key head).

Owns: convolution, gates and norms of the nodes. Does not know: how nodes follow each other
(``../tree_recurrence/layer_compiled.py``), modes beyond which buffers there are.

Invariants: in modes ``snapshot`` and ``replay`` outputs and node states have the bits of
``compiled.mix_serial`` on the node's path; a tree's result does not depend on its neighbours.
Read next: ``tree_reference.py`` (the readable twin), ``compiled.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

import numpy as np
from numba import prange

from hyradix.kernels.causal_conv.tree_compiled import convolve_node, write_columns
from hyradix.kernels.gated_delta_net.compiled import (
    gate_norm,
    log_decay,
    segments_of,
    silu_row,
    unit_keys,
)
from hyradix.kernels.numba_support import compiled, sigmoid32
from hyradix.kernels.simd import at
from hyradix.kernels.tree_recurrence.layer_compiled import hold_inputs, walk
from hyradix.kernels.tree_recurrence.log_compiled import solve


@compiled()
def _prepare(
    projected, token, count, taps, first, conv_state, slot, conv, row, first_node, num_base, group,
    num_k_heads, num_v_heads, dk, dv, conv_weight, decay_rate, dt_bias, mixed, g, beta,
):  # fmt: skip
    """The group's q, k, v (convolved, q and k of length 1) and gates of every node."""
    ratio = num_v_heads // num_k_heads
    width, channels = conv_weight.shape[1], conv_weight.shape[2]
    segments = segments_of(group, num_k_heads, ratio, dk, dv)
    write_columns(
        projected, token, count, conv_state, slot, conv, row, first_node, num_base, segments
    )
    b0 = 2 * (num_k_heads * dk + num_v_heads * dv)
    a0 = b0 + num_v_heads
    for node in range(count):
        convolve_node(conv, row, conv_state, slot, taps, first + node, segments, conv_weight,
                      group * width * channels, mixed, node * channels)  # fmt: skip
        silu_row(mixed, node * channels, channels)
        unit_keys(mixed, node * channels, dk)
        source = (token + node) * projected.shape[1] + group * ratio
        for r in range(ratio):
            head = group * ratio + r
            a = at(projected, source + a0 + r) + dt_bias[head]
            g[node * ratio + r] = log_decay(a, decay_rate[head])
            beta[node * ratio + r] = sigmoid32(at(projected, source + b0 + r))


@compiled()
def _finish(projected, token, count, group, ratio, num_k_heads, dk, dv, o, weight, eps, out):
    """The gated norm of every node, to its row of ``out``."""
    gate = np.empty(dv, np.float32)
    value_dim = num_k_heads * ratio * dv
    z0 = 2 * num_k_heads * dk + value_dim
    for node in range(count):
        for r in range(ratio):
            head = (group * ratio + r) * dv
            source = (token + node) * projected.shape[1] + z0 + head
            gate_norm(o, (node * ratio + r) * dv, dv, projected, source, gate, weight, eps, out,
                      (token + node) * value_dim + head)  # fmt: skip


@compiled()
def _walk_group(
    projected, trees, tree, group, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps,
    conv_state, state, columns, conv, states, k, v, gates, rates, out,
):  # fmt: skip
    """One tree and one key head with its value heads, in decode's order."""
    cu_nodes, parents, _, _, first_token, slots, rows, _, taps = trees
    num_v_heads, dk, dv = state.shape[1:]
    ratio, channels = num_v_heads // num_k_heads, conv_weight.shape[2]
    first, count = np.int64(cu_nodes[tree]), np.int64(cu_nodes[tree + 1] - cu_nodes[tree])
    token, slot, row = np.int64(first_token[tree]), np.int64(slots[tree]), np.int64(rows[tree])
    mixed = np.empty(count * channels, np.float32)
    g, beta = np.empty(count * ratio, np.float32), np.empty(count * ratio, np.float32)
    o = np.empty(count * ratio * dv, np.float32)
    _prepare(projected, token, count, taps, first, conv_state, slot, conv, row, columns[0],
             columns[1], group, num_k_heads, num_v_heads, dk, dv, conv_weight, decay_rate, dt_bias,
             mixed, g, beta)  # fmt: skip
    walk(parents, first, count, state, slot, states, row, group, ratio, mixed, channels, g, beta,
         True, False, o)  # fmt: skip
    if k.size > 0:
        hold_inputs(count, row, group, ratio, dk, dv, mixed, channels, g, beta, k, v, gates, rates)
    _finish(projected, token, count, group, ratio, num_k_heads, dk, dv, o, norm_weight, eps, out)


@compiled()
def walk_serial(
    projected, trees, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state,
    state, columns, conv, states, k, v, gates, rates, out,
):  # fmt: skip
    """``tree_reference.mix_trees`` in modes ``snapshot`` (k, v, gates, rates are empty) and
    ``replay``. trees: the arrays of a ``RaggedTrees`` as ``compiled_ops`` lists them. columns:
    (first_node, num_base_columns)."""
    for task in range(trees[4].size * num_k_heads):
        _walk_group(projected, trees, task // num_k_heads, task % num_k_heads, num_k_heads,
                    conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state, state, columns,
                    conv, states, k, v, gates, rates, out)  # fmt: skip


@compiled(parallel=True)
def walk_parallel(
    projected, trees, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state,
    state, columns, conv, states, k, v, gates, rates, out,
):  # fmt: skip
    """``walk_serial`` over all threads."""
    for i in prange(trees[4].size * num_k_heads):
        task = np.int64(i)
        _walk_group(projected, trees, task // num_k_heads, task % num_k_heads, num_k_heads,
                    conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state, state, columns,
                    conv, states, k, v, gates, rates, out)  # fmt: skip


@compiled()
def _solve_group(
    projected, trees, tree, group, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps,
    conv_state, state, columns, conv, log_k, log_u, log_g, out,
):  # fmt: skip
    """One tree and one key head with its value heads, from the base and its log."""
    cu_nodes, parents, path_offsets, path_nodes, first_token, slots, rows, num_log_rows, taps = (
        trees
    )
    num_v_heads, dk, dv = state.shape[1:]
    ratio, channels = num_v_heads // num_k_heads, conv_weight.shape[2]
    first, count = np.int64(cu_nodes[tree]), np.int64(cu_nodes[tree + 1] - cu_nodes[tree])
    token, slot, row = np.int64(first_token[tree]), np.int64(slots[tree]), np.int64(rows[tree])
    mixed = np.empty(count * channels, np.float32)
    g, beta = np.empty(count * ratio, np.float32), np.empty(count * ratio, np.float32)
    o = np.empty(count * ratio * dv, np.float32)
    _prepare(projected, token, count, taps, first, conv_state, slot, conv, row, columns[0],
             columns[1], group, num_k_heads, num_v_heads, dk, dv, conv_weight, decay_rate, dt_bias,
             mixed, g, beta)  # fmt: skip
    solve(parents, path_offsets, path_nodes, first, count, state, slot, row,
          np.int64(num_log_rows[tree]), columns[2], group, ratio, mixed, channels, g, beta, log_k,
          log_u, log_g, True, o)  # fmt: skip
    _finish(projected, token, count, group, ratio, num_k_heads, dk, dv, o, norm_weight, eps, out)


@compiled()
def solve_serial(
    projected, trees, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state,
    state, columns, conv, log_k, log_u, log_g, out,
):  # fmt: skip
    """``tree_reference.mix_trees`` in mode ``log``. columns: (first_node, num_base_columns, R)."""
    for task in range(trees[4].size * num_k_heads):
        _solve_group(projected, trees, task // num_k_heads, task % num_k_heads, num_k_heads,
                     conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state, state,
                     columns, conv, log_k, log_u, log_g, out)  # fmt: skip


@compiled(parallel=True)
def solve_parallel(
    projected, trees, num_k_heads, conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state,
    state, columns, conv, log_k, log_u, log_g, out,
):  # fmt: skip
    """``solve_serial`` over all threads."""
    for i in prange(trees[4].size * num_k_heads):
        task = np.int64(i)
        _solve_group(projected, trees, task // num_k_heads, task % num_k_heads, num_k_heads,
                     conv_weight, decay_rate, dt_bias, norm_weight, eps, conv_state, state,
                     columns, conv, log_k, log_u, log_g, out)  # fmt: skip

"""Decode's own order over a tree, batched: node states go into a buffer that the caller lends.

Owns: ``verify`` (modes ``snapshot`` and ``replay``) and ``replay_`` (accepted tokens into states).
Does not know: whether the buffer is one layer's reused by all (``replay``) or a layer's own part of
a larger one (``snapshot``); who owns a slot.
Invariant: ``replay_`` of a path ends in the bits that ``verify`` left in the buffer at its node.
Source: DESIGN section 6, the table. Read next: ``masked.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.tree_recurrence.rules import Inputs, Rows, Rule, apply_row, read, update
from hyradix.kernels.tree_recurrence.topology import Tree


def verify(
    rule: Rule,
    base: torch.Tensor,
    log: Rows,
    num_log_rows: torch.Tensor,
    q: torch.Tensor,
    inputs: Inputs,
    tree: Tree,
    buffer: torch.Tensor,
) -> tuple[torch.Tensor, Rows]:
    """Every node from its parent's state in the buffer; a root from the base and its log.

    Args:
        base: ``[N, Hv, K, V]``, not written. log: R rows, ``num_log_rows`` ``int64[N]`` valid.
        q: ``[N, T, Hk, K]``. inputs: T nodes; what stands at padding is not read.
        buffer: ``[N, T, Hv, K, V]`` at least, any content.

    Returns: o ``[N, T, Hv, V]`` and the nodes' rows, zero at padding.
    Effects: ``buffer[n, t]`` becomes the state after node t (at padding: of no meaning, finite).
    """
    num_requests, num_nodes = q.shape[:2]
    q, inputs = where_nodes(q, inputs, tree)
    start = after_log(base, log, num_log_rows)
    requests = torch.arange(num_requests, device=q.device)
    outputs, us = [], []
    for node in range(num_nodes):
        parent = tree.parents[:, node].clamp(min=0)  # padding goes on from the root
        before = start if node == 0 else buffer[requests, parent]
        u, state = _update_at(rule, before, inputs, node)
        buffer[:num_requests, node] = state
        outputs.append(read(state, q[:, node]))
        us.append(u)
    return torch.stack(outputs, 1), Rows(inputs.k, torch.stack(us, 1), inputs.g)


def replay_(
    rule: Rule,
    pool: torch.Tensor,
    slots: torch.Tensor,
    held: Inputs,
    counts: torch.Tensor,
    *,
    save_counts: torch.Tensor | None = None,
    save_slots: torch.Tensor | None = None,
) -> None:
    """Run ``counts`` ``int64[N]`` held tokens of each request into its state, in place.

    Args:
        pool: ``[num_slots, Hv, K, V]``. slots: ``int64[N]``, all different (the sink apart).
        held: M tokens, the first ``counts`` of them valid.
        save_counts, save_slots: ``int64[N]``: the state after exactly that many of the tokens is
            also written to that slot (a track boundary); 0 tokens: nothing is saved.
    """
    is_held = torch.arange(held.v.shape[1], device=counts.device) < counts.unsqueeze(1)
    held = held.where(is_held)  # zeros move no state
    state = pool.index_select(0, slots)
    for token in range(held.v.shape[1]):
        _, state = _update_at(rule, state, held, token)
        if save_counts is not None and save_slots is not None:
            is_due = save_counts == token + 1
            pool[save_slots[is_due]] = state[is_due]
    pool.index_copy_(0, slots, state)


def after_log(base: torch.Tensor, log: Rows, num_log_rows: torch.Tensor) -> torch.Tensor:
    """The states ``[N, Hv, K, V]`` after each request's valid rows, one row after the other."""
    is_row = torch.arange(log.u.shape[1], device=base.device) < num_log_rows.unsqueeze(1)
    log = log.where(is_row)
    state = base
    for row in range(log.u.shape[1]):
        state = apply_row(state, log.k[:, row], log.u[:, row], log.g[:, row])
    return state


def where_nodes(q: torch.Tensor, inputs: Inputs, tree: Tree) -> tuple[torch.Tensor, Inputs]:
    """Zeros at padding, whatever stood there."""
    return q.masked_fill(~tree.is_node[:, :, None, None], 0), inputs.where(tree.is_node)


def _update_at(
    rule: Rule, state: torch.Tensor, inputs: Inputs, token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, g, beta = (x[:, token] for x in (inputs.k, inputs.v, inputs.g, inputs.beta))
    return update(rule, state, k, v, g, beta)

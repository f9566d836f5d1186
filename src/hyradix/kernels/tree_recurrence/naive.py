"""The oracle: node after node, a state for every node, in the dtype of its inputs.

Owns: the definition that every other form is compared with. Does not know: batches, padding, slots.
Source: DESIGN sections 6 and 6.1. Read next: ``sequential.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyradix.kernels.tree_recurrence.rules import Inputs, Rows, Rule, apply_row, read, update
from hyradix.kernels.tree_recurrence.topology import PAD, check_parents


def naive(
    rule: Rule,
    base: torch.Tensor,
    log: Rows,
    q: torch.Tensor,
    inputs: Inputs,
    parents: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """One request: the log row by row onto the base, then every node from its parent's state.

    Args:
        base: ``[Hv, K, V]``. log: R rows, all of them valid, no leading N.
        q: ``[T, Hk, K]``. inputs: T nodes, no leading N. parents: T, without padding.

    Returns: o ``[T, Hv, V]``, node states ``[T, Hv, K, V]``, the nodes' rows.
    Raises: ``ValueError`` where ``parents`` is no tree, or padded.
    """
    check_parents(parents)
    if PAD in parents:
        raise ValueError("the oracle takes no padding")
    start = base
    for k, u, g in zip(log.k, log.u, log.g, strict=True):
        start = apply_row(start, k, u, g)
    states: list[torch.Tensor] = []
    us, outputs = [], []
    for node, parent in enumerate(parents):
        before = states[parent] if parent >= 0 else start
        k, v, g, beta = (x[node] for x in (inputs.k, inputs.v, inputs.g, inputs.beta))
        u, state = update(rule, before, k, v, g, beta)
        states.append(state)
        us.append(u)
        outputs.append(read(state, q[node]))
    return torch.stack(outputs), torch.stack(states), Rows(inputs.k, torch.stack(us), inputs.g)

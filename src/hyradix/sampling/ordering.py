"""The largest logits of a row in one canonical order: by value, equal values by token id.

Owns: the order. ``torch.topk`` leaves open which of several equal values it returns, and bfloat16
models produce many; here the answer depends on the row alone.
Does not know: probabilities, requests.
Read next: ``picking.py``, ``logprobs.py``.
"""

from __future__ import annotations

import torch


def largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the token ids of the k largest logits of each row, ``int64[M, k]``, best first.

    Equal logits are ordered by token id, the lower first, also where k cuts through them.
    Entries of -inf are in no particular order. ``1 <= k <= V``.

    Cost: one partial sort, plus O(V) for each row with a tie across the cut.
    """
    num_tokens = logits.shape[-1]
    if k == num_tokens:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    values, ids = logits.topk(k + 1, dim=-1)
    last = values[:, k - 1]
    is_cut = (last == values[:, k]) & (last > -torch.inf)
    values, ids = values[:, :k].contiguous(), ids[:, :k].contiguous()
    for row in is_cut.nonzero().flatten().tolist():
        num_greater = int((values[row] > last[row]).sum())
        tied = (logits[row] == last[row]).nonzero().flatten()
        ids[row, num_greater:] = tied[: k - num_greater]
    ids, by_id = ids.sort(dim=-1)
    by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_value)

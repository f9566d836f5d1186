"""Log probabilities of given tokens and of the likeliest ones.

Owns: the numbers reported as ``logprobs``. They are those of the model's own distribution:
log_softmax of the unmodified logits, before temperature, penalties, biases and filters (what
vLLM reports by default). So a sampled token's logprob can be lower than its chance was.
Does not know: requests, sampling.
"""

from __future__ import annotations

import numpy as np
import torch

from hyradix.request import Int32Array, TokenLogprobs
from hyradix.sampling.ordering import largest

_BLOCK = 64
"""Positions at a time: bounds the memory of a long prompt's logprobs."""


def logprobs_of(logits: torch.Tensor, token_ids: Int32Array, num_top: int) -> TokenLogprobs:
    """Log probabilities of ``token_ids`` and of the ``num_top`` likeliest tokens.

    Args:
        logits: ``float32[P, V]``, unmodified.
        token_ids: ``int32[P]``, the token at each position.
        num_top: 0 or more; limited to V.

    A rank is 1 + the number of strictly likelier tokens; equal ones share it. Equal tokens of the
    top list stand in id order.
    """
    num_top = min(num_top, logits.shape[-1])
    ids = torch.as_tensor(np.asarray(token_ids, dtype=np.int64), device=logits.device)
    blocks = [
        _block(logits[i : i + _BLOCK], ids[i : i + _BLOCK], num_top)
        for i in range(0, len(ids), _BLOCK)
    ]
    if not blocks:
        blocks = [_block(logits[:0], ids[:0], 0)]
    chosen, ranks, top_ids, top = (
        torch.cat(part).cpu().numpy() for part in zip(*blocks, strict=True)
    )
    return TokenLogprobs(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=chosen.astype(np.float32),
        ranks=ranks.astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top.astype(np.float32),
    )


def _block(
    logits: torch.Tensor, ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.log_softmax(dim=-1)
    chosen_logit = logits.gather(1, ids[:, None])
    ranks = 1 + (logits > chosen_logit).sum(dim=-1)
    top_ids = largest(logits, num_top) if num_top else ids.new_empty((len(ids), 0))
    return logprobs.gather(1, ids[:, None]).flatten(), ranks, top_ids, logprobs.gather(1, top_ids)

"""Rows of an embedding by token id, in torch. Read next: ``triton.py``."""

from __future__ import annotations

import torch


def embed(weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows ``[T, C]`` of weight ``[V, C]`` by ``int[T]``."""
    return weight.index_select(0, token_ids.long())

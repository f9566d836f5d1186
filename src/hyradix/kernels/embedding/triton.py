"""Rows of an embedding by token ids that are on the device already.

Owns: ``embed``. Invariant: ids outside of the vocabulary (padding, not yet sampled) read row 0.
Read next: ``reference.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import ceil_div, launch, store

_BLOCK = 1024


def embed(weight: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out ``[T, C]``, in its own type: rows of weight ``[V, C]`` by ``int32[T]``."""
    assert weight.stride(1) == out.stride(1) == 1
    size = weight.shape[1]
    launch(
        _embed_kernel,
        (token_ids.shape[0], ceil_div(size, _BLOCK)),
        weight, weight.stride(0), token_ids, out, out.stride(0), weight.shape[0], size, _BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _embed_kernel(
    weight, weight_stride, token_ids, out, out_stride, V: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.load(token_ids + token).to(tl.int64)
    i = tl.where((i >= 0) & (i < V), i, 0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + i * weight_stride + c, mask=c < C, other=0.0)
    store(out + token * out_stride + c, value, c < C)

"""Attention of the Triton backend, to keys and values or to latent rows.

Owns: which tokens attend in one launch, scratch for long rows and for copied keys. Does not know:
layers, who owns a slot.

Invariant: what a token sees is what ``attention/queries.py`` says; pools that are read-only are
only read.
Read next: ``triton_tokens.py``, ``attention/triton.py``, ``triton_ops.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hyradix.device_bytes import gathered_keys
from hyradix.kernels.attention import triton as attention_kernels
from hyradix.kernels.attention.queries import RaggedQueries, WantedTokens
from hyradix.kernels.attention.reference import AttentionWeights, check_short
from hyradix.kernels.attention.triton import AttendScratch
from hyradix.kernels.attention.triton_gather import KeyScratch, gather
from hyradix.kernels.attention.triton_write import write_kv
from hyradix.kernels.device_forms import DeviceTokens, DeviceWanted, Part
from hyradix.kernels.memory import ReadOnly, moved
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.mla.triton import DeviceLatent, LatentScratch, latent_attention
from hyradix.kernels.triton_batches import Batches
from hyradix.kernels.triton_dense import DenseOps

Queries = RaggedQueries | DeviceTokens
Wanted = WantedTokens | DeviceWanted
LEAST_PARTS = 1024
"""(token, split) pairs of attention that there is scratch for, at least. Layers and parts of a step
use it in turn; ``device_bytes`` counts the same."""


class AttentionOps(DenseOps):
    """See ``ops.Ops``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._batches = Batches(device, dtype.itemsize)
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack_attention(self, weights: AttentionWeights) -> AttentionWeights:
        sizes = (weights.num_heads, weights.head_dim)
        self._scratch.declare(AttendScratch, *sizes, by_row=True, least=LEAST_PARTS)
        keys = gathered_keys(weights.head_dim, self.dtype.itemsize)
        if keys:
            sizes = (weights.num_kv_heads, weights.head_dim)
            self._scratch.declare(self._key_scratch, *sizes, by_row=True, least=keys)
        if self._angles is None or self._angles[0] is not weights.angles:
            self._angles = weights.angles, weights.angles.to(self.device)
        return moved(replace(weights, angles=self._angles[1]), self.device)

    def attention(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: Queries,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        if isinstance(k_pool, ReadOnly) or isinstance(v_pool, ReadOnly):
            raise ValueError("this memory is read-only: no K and V are written to it")
        heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
        forms = self._batches.tokens(batch, heads, kv_heads, dim)
        q = projected.new_empty(projected.shape[0], heads, dim)
        write_kv(projected, weights, forms.positions, forms.write_slots, q, k_pool, v_pool)
        gate = projected[:, (heads + 2 * kv_heads) * dim :] if weights.has_gate else None
        parts = forms.parts
        if wanted is not None:
            chosen = self._batches.wanted(wanted, heads, kv_heads, dim)
            q, parts = q.index_select(0, chosen.index), chosen.parts
            gate = None if gate is None else gate.index_select(0, chosen.index)
        return self._attend(q, gate, parts, k_pool, v_pool)

    def attend_frozen(
        self,
        projected: torch.Tensor,
        weights: AttentionWeights,
        batch: Queries,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(batch, RaggedQueries):
            check_short(batch)
        k, v = (x.elem if isinstance(x, ReadOnly) else x for x in (k, v))
        heads, dim = weights.num_heads, weights.head_dim
        forms = self._batches.tokens(batch, heads, weights.num_kv_heads, dim)
        q = projected.new_empty(projected.shape[0], heads, dim)
        write_kv(projected, weights, forms.positions, forms.write_slots, q, None, None)
        return self._attend(q, projected[:, heads * dim :], forms.parts, k, v)

    def _attend(
        self,
        q: torch.Tensor,
        gate: torch.Tensor | None,
        parts: tuple[Part, ...],
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        heads, dim = q.shape[1], v.shape[2]
        out = q.new_empty(q.shape[0], heads * dim)
        for part in parts:
            there, keys, values, places = part.tokens, k, v, None
            if part.keys is not None:
                capacity = gathered_keys(k.shape[2], k.itemsize)
                room = self._scratch.get(self._key_scratch, capacity, *k.shape[1:])
                keys, values = gather(part.queries, part.keys, k, v, room)
                places = part.keys.offsets
            attention_kernels.attend(
                q[there], part.queries, keys, values, q.shape[2] ** -0.5, part.config,
                self._scratch.get(AttendScratch, LEAST_PARTS, heads, dim), out[there],
                gate=None if gate is None else gate[there], places=places,
            )  # fmt: skip
        return out

    def _key_scratch(
        self, capacity: int, kv_heads: int, dim: int, device: torch.device
    ) -> KeyScratch:
        return KeyScratch(capacity, kv_heads, dim, self.dtype, device)

    def pack_latent_attention(self, weights: LatentWeights) -> DeviceLatent:
        sizes = (weights.num_heads, weights.rank, weights.num_shared)
        self._scratch.declare(self._latent_scratch, *sizes, by_row=False)
        return DeviceLatent.of(weights, self.device, self.dtype)

    def latent_attention(
        self,
        projected: torch.Tensor,
        weights: DeviceLatent,
        batch: Queries,
        pool: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        heads, num_tokens = weights.num_heads, projected.shape[0]
        forms = self._batches.tokens(batch, heads, 1, weights.row_dim, is_latent=True)
        sizes = (heads, weights.rank, weights.num_shared)
        scratch = self._scratch.get(self._latent_scratch, num_tokens, *sizes)
        chosen = None
        if wanted is not None:
            chosen = self._batches.wanted(wanted, heads, 1, weights.row_dim, is_latent=True)
            num_tokens = chosen.index.shape[0]
        out = projected.new_empty(num_tokens, heads * weights.values.shape[2])
        return latent_attention(projected, weights, forms, pool, scratch, out, chosen)

    def _latent_scratch(
        self, capacity: int, heads: int, rank: int, shared: int, device: torch.device
    ) -> LatentScratch:
        return LatentScratch(
            capacity, heads, rank, shared, device, self.dtype, max_parts=LEAST_PARTS
        )

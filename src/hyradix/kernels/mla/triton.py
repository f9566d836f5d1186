"""Latent attention on the GPU, absorbed: queries meet the pool's rows, values are made after.

Owns: ``DeviceLatent`` (weights), ``LatentScratch``, ``latent_attention`` and the launch before it.
Does not know: projections of the hidden state, who owns a slot, which columns a query sees.

Launches: the new rows and the queries' shared parts; queries times W_uk, head by head; for each
part of the tokens the attention (and the sum over its splits); the weighed rows times W_uv. The
form that makes keys and values of every row first (``reference.expanded``) needs lengths on the
host and is not used here.

Invariants:
- Tokens whose write slot is 0 write nothing to the pool; where such a token also sees nothing (a
  row that pads a batch) its output is zeros.
- Nothing waits for the device, shapes follow from the number of tokens: safe in a CUDA graph.
Read next: ``reference.py`` (the readable twin), ``../attention/triton.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyradix.errors import ConfigError
from hyradix.kernels.attention.triton import AttendScratch, attend
from hyradix.kernels.device_forms import DeviceTokens, DeviceWanted
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.triton_support import launch, load32, power_of_two, store


@dataclass(frozen=True, slots=True)
class DeviceLatent:
    """``LatentWeights`` on the device: keys ``[H, nope, R]``, values ``[H, R, V]`` (turned).

    keys and values in the activations' type, norm ``float32[R]``.
    """

    num_shared: int
    keys: torch.Tensor
    values: torch.Tensor
    norm: torch.Tensor
    eps: float

    @classmethod
    def of(cls, weights: LatentWeights, device: torch.device, dtype: torch.dtype) -> DeviceLatent:
        """Copies. Raises ``ConfigError`` where a row's heads do not fit one block."""
        most = 64 if dtype.itemsize == 2 else 32
        if weights.num_heads > most:
            raise ConfigError(
                f"latent attention on a GPU takes up to {most} heads of {dtype}, "
                f"got {weights.num_heads}"
            )
        return cls(
            num_shared=weights.num_shared,
            keys=weights.keys.to(device, dtype).contiguous(),
            values=weights.values.transpose(1, 2).to(device, dtype).contiguous(),
            norm=weights.norm.to(device, torch.float32).contiguous(),
            eps=weights.eps,
        )

    @property
    def num_heads(self) -> int:
        """H."""
        return self.keys.shape[0]

    @property
    def rank(self) -> int:
        """R."""
        return self.keys.shape[2]

    @property
    def row_dim(self) -> int:
        """E: numbers of a pool row, and of an absorbed query."""
        return self.rank + self.num_shared

    @property
    def query_dim(self) -> int:
        """Numbers of one head's query as projected."""
        return self.keys.shape[1] + self.num_shared


class LatentScratch:
    """Absorbed queries and weighed rows of up to ``max_tokens`` tokens; layers use it in turn.

    max_parts: (token, split) pairs of an attention in parts, see ``AttendScratch``.
    """

    def __init__(
        self,
        max_tokens: int,
        num_heads: int,
        rank: int,
        num_shared: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_parts: int = 512,
    ) -> None:
        shape = (max_tokens, num_heads)
        self.query = torch.empty(*shape, rank + num_shared, device=device, dtype=dtype)
        self.context = torch.empty(*shape, rank, device=device, dtype=dtype)
        self.parts = AttendScratch(max_parts, num_heads, rank, device)

    @property
    def num_bytes(self) -> int:
        """Allocated."""
        return sum(x.nbytes for x in (self.query, self.context, self.parts.o, self.parts.lse))


def latent_attention(
    projected: torch.Tensor,
    weights: DeviceLatent,
    tokens: DeviceTokens,
    pool: torch.Tensor,
    scratch: LatentScratch,
    out: torch.Tensor,
    wanted: DeviceWanted | None = None,
) -> torch.Tensor:
    """Write the tokens' rows, attend; see ``reference.latent_attention``.

    Args:
        projected: ``[T, H (nope + E - R) + E]``. pool: ``[slots, 1, E]``. out: ``[T, H V]``, or
            ``[M, H V]`` where only M tokens are wanted. All three in the weights' type.
        tokens: blocks made for groups of H heads, those of ``wanted`` too. Splits are reduced to
            what ``scratch`` has parts for.

    Returns: out.
    """
    count, heads, rank = projected.shape[0], weights.num_heads, weights.rank
    if count == 0:
        return out
    query, parts = scratch.query[:count], tokens.parts
    write_rows(projected, weights, tokens.write_slots, pool, query)
    if wanted is not None:
        count, parts = wanted.index.shape[0], wanted.parts
        if count == 0:
            return out
        projected, query = (x.index_select(0, wanted.index) for x in (projected, query))
    context = scratch.context[:count]
    q = projected[:, : heads * weights.query_dim].unflatten(1, (heads, weights.query_dim))
    nope = q[:, :, : weights.keys.shape[1]].transpose(0, 1)
    torch.bmm(nope, weights.keys, out=query[:, :, :rank].transpose(0, 1))
    for part in parts:
        attend(
            query[part.tokens], part.queries, pool, pool[:, :, :rank], weights.query_dim**-0.5,
            part.config, scratch.parts, context[part.tokens].flatten(1), is_view=True,
        )  # fmt: skip
    by_head = out.unflatten(1, (heads, weights.values.shape[2])).transpose(0, 1)
    torch.bmm(context.transpose(0, 1), weights.values, out=by_head)
    return out


def write_rows(
    projected: torch.Tensor,
    weights: DeviceLatent,
    write_slots: torch.Tensor,
    pool: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """pool[slot] = [rms_norm(c), r] and query ``[T, H, E]``'s last numbers, in one launch."""
    heads, shared, width = weights.num_heads, weights.num_shared, weights.row_dim
    assert projected.stride(1) == 1
    assert pool.stride(2) == 1
    assert query.is_contiguous()
    assert pool.shape[2] == query.shape[2] == width
    launch(
        _write_kernel,
        (projected.shape[0], 2 if shared else 1),
        projected, projected.stride(0), weights.norm, weights.eps, write_slots, pool,
        pool.stride(0), query, heads, weights.query_dim, weights.rank, shared,
        power_of_two(heads), power_of_two(weights.rank), power_of_two(max(shared, 1)),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    projected, projected_stride, norm, eps, write_slots, pool, pool_stride, query,
    H: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, SHARED: tl.constexpr,
    BH: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Program (token, 0) makes the row, (token, 1) copies what its queries share."""
    token = tl.program_id(0).to(tl.int64)
    x = projected + token * projected_stride
    s = tl.arange(0, BS)
    if tl.program_id(1) == 1:
        h = tl.arange(0, BH)[:, None]
        inside = (h < H) & (s < SHARED)[None, :]
        part = load32(x + h * D + (D - SHARED) + s[None, :], inside)
        place = token * (H * (RANK + SHARED)) + h * (RANK + SHARED) + RANK + s[None, :]
        store(query + place, part, inside)
        return
    slot = tl.load(write_slots + token).to(tl.int64)
    if slot == 0:
        return
    c = tl.arange(0, BR)
    row, target = x + H * D, pool + slot * pool_stride
    latent = load32(row + c, c < RANK)
    scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
    store(target + c, latent * scale * load32(norm + c, c < RANK), c < RANK)
    store(target + RANK + s, load32(row + RANK + s, s < SHARED), s < SHARED)

"""Random rows over scattered KV slots, and what each query must see, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hyradix.kernels.attention.triton import DeviceQueries, query_blocks, tokens_per_block
from hyradix.kernels.attention.triton_gather import DeviceKeys, KeyScratch, key_layout
from hyradix.kernels.triton_table import AttendConfig

NAN = float("nan")


@dataclass
class AttentionCase:
    """Rows of ``counts`` new tokens behind ``starts`` earlier ones; NaN where nobody may read.

    parents: per row, of its own tokens, where the rows are draft trees.
    """

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    starts: list[int]
    counts: list[int]
    parents: list[list[int]] | None = None
    dtype: torch.dtype = torch.float32
    is_latent: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_rows = len(self.starts)
        longest = max(s + n for s, n in zip(self.starts, self.counts, strict=True))
        order = torch.randperm(num_rows * longest, generator=generator).int() + 1
        self.table = order.reshape(num_rows, longest)
        self.rows = torch.randperm(num_rows, generator=generator).int()
        slots = num_rows * longest + 1
        self.k = torch.full((slots, self.kv_heads, self.dim), NAN, dtype=self.dtype)
        self.v = torch.full((slots, self.kv_heads, self.v_dim), NAN, dtype=self.dtype)
        for i, row in enumerate(self.rows.tolist()):
            used = self.table[row, : self.starts[i] + self.counts[i]].long()
            for pool in (self.k, self.v):
                values = torch.randn(len(used), *pool.shape[1:], generator=generator)
                pool[used] = values.to(self.dtype)
        if self.is_latent:
            self.v = self.k[..., : self.v_dim]
        total = sum(self.counts)
        shape = (total, self.heads, self.dim)
        self.q = torch.randn(shape, generator=generator).to(self.dtype)
        gate = torch.randn(total, self.heads * self.v_dim, generator=generator)
        self.gate = gate.to(self.dtype)
        self.cu = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    def ancestors(self) -> torch.Tensor:
        bits: list[int] = []
        for row in self.parents or []:
            own: list[int] = []
            for node, parent in enumerate(row):
                own.append((own[parent] if parent >= 0 else 0) | 1 << node)
            bits += own
        return torch.tensor(bits, dtype=torch.int64)

    def queries(self, config: AttendConfig, device: torch.device) -> DeviceQueries:
        tokens = tokens_per_block(config, self.heads // self.kv_heads)
        blocks = query_blocks(self.cu, np.array(self.starts, np.int32), tokens)
        return DeviceQueries(
            torch.from_numpy(self.cu).to(device),
            self.rows.to(device),
            torch.tensor(self.starts, dtype=torch.int32, device=device),
            torch.from_numpy(blocks).to(device),
            self.table.to(device),
            None if self.parents is None else self.ancestors().to(device),
        )

    def keys(self, device: torch.device) -> tuple[DeviceKeys, KeyScratch]:
        """All of them in one place, poisoned before."""
        num_keys = np.array(self.starts, np.int32) + np.array(self.counts, np.int32)
        keys = DeviceKeys(*(torch.from_numpy(x).to(device) for x in key_layout(num_keys)))
        room = KeyScratch(int(num_keys.sum()), self.kv_heads, self.dim, self.dtype, device)
        room.k.fill_(NAN)
        room.v.fill_(NAN)
        return keys, room

    def expected(self, scale: float, *, has_gate: bool) -> torch.Tensor:
        out = []
        group = self.heads // self.kv_heads
        ancestors = self.ancestors().tolist()
        for i, row in enumerate(self.rows.tolist()):
            for own in range(self.counts[i]):
                token, start = int(self.cu[i]) + own, self.starts[i]
                seen = list(range(start + own + 1))
                if self.parents is not None:
                    path = [j for j in range(self.counts[i]) if ancestors[token] >> j & 1]
                    seen = list(range(start)) + [start + j for j in path]
                slots = self.table[row, seen].long()
                k = self.k[slots].double().repeat_interleave(group, 1)
                v = self.v[slots].double().repeat_interleave(group, 1)
                p = (torch.einsum("hd,nhd->hn", self.q[token].double(), k) * scale).softmax(1)
                out.append(torch.einsum("hn,nhd->hd", p, v).flatten())
        result = torch.stack(out)
        return result * self.gate.double().sigmoid() if has_gate else result

"""The two draft heads of the demo model, as functions of the frozen target's outputs.

Owns: their parameters under their checkpoint names, and the forward pass of every draft step at
every position of packed documents at once.
Does not know: losses, data, files. The target's embedding (tied with its lm_head) is an argument.
A head reads the token t_i and the hidden state h_{i-1} (after the target's final norm) and says
t_{i+1}; the next step reads t_{i+1} and the head's own last output. `anchor` i is where a chain of
steps begins: step k of anchor i reads t_{i+k-1}.
Invariants: `mtp` sees the pairs (t_j, h_{j-1}), 1 <= j <= i, and the earlier steps of its own
chain; `frozen_kv_mtp` sees the target's keys and values at j < i, its own position fixed at i-1.
Documents do not see each other. Position 0 has no pair; what comes out there means nothing.
Source of the recursion over all positions at once: EAGLE-3 (arXiv 2503.01840), section 3.
Read next: `train_drafts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from model import Shape, attention_inputs, attention_outputs, linear, rms_norm
from torch import Tensor, nn

INTERMEDIATE = {"mtp": 640, "frozen_kv_mtp": 832}
MTP, FROZEN = INTERMEDIATE
CHAIN_PADDING = 8  # scores of a chain are padded to whole groups: products need aligned rows


@dataclass(frozen=True)
class Rows:
    """Packed documents and what the target made of them; a document's first `position` is 0."""

    ids: Tensor  # int64[R, T]
    position: Tensor  # int64[R, T]
    hidden: Tensor  # [R, T, hidden], after the final norm
    keys: Tensor  # [R, T, KV, D], of the last full attention layer, rotated by `position`
    values: Tensor  # [R, T, KV, D]

    def later(self, k: int) -> Tensor:
        """The token `k` places after each one, int64[R * T]; at a row's end it wraps around."""
        return self.ids.roll(-k, 1).flatten()

    def shaped(self, flat: Tensor) -> Tensor:
        """[R * T, ...] as [R, T, ...]."""
        return flat.view(*self.ids.shape, *flat.shape[1:])


def rotary(position: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, R] for int64[N] positions."""
    pairs = int(shape.head_dim * shape.rotary_share) // 2
    wide = torch.promote_types(dtype, torch.float32)
    power = torch.arange(pairs, device=position.device, dtype=wide) / pairs
    angle = position.to(wide)[:, None] * shape.rope_theta**-power
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def seen_pairs(position: Tensor) -> Tensor:
    """bool[R, T, T]: which pairs of step 1 an anchor sees. A first token only sees itself."""
    document = (position == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    eye = torch.eye(position.shape[1], dtype=torch.bool, device=position.device)
    return (same.tril() & (position > 0)[:, None, :]) | eye


def seen_target(position: Tensor) -> Tensor:
    """bool[R, T, T]: which of the target's keys an anchor sees: those of consumed tokens."""
    document = (position == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril(-1) | torch.diag_embed(position == 0)


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, chain: list[tuple[Tensor, Tensor]], mask: Tensor
) -> Tensor:
    """Attention over shared keys and, at each position, over that position's own chain.

    Args: q [R, T, H, D]; k, v and each pair in `chain` [R, T, KV, D]; mask bool[R, T, T], where
    True is seen. Chain keys are seen by the same position's query only. Returns like q.
    """
    r, t, h, d = q.shape
    kv = k.shape[2]
    q = q.view(r, t, kv, h // kv, d).permute(0, 2, 3, 1, 4) * d**-0.5  # [R, KV, G, T, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    scores = (q.reshape(r, kv, -1, d) @ k.mT).view(r, kv, -1, t, t)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    if chain:
        own = [(q * key.transpose(1, 2)[:, :, None]).sum(-1, keepdim=True) for key, _ in chain]
        padded = F.pad(torch.cat(own, -1), (0, -len(own) % CHAIN_PADDING), value=-torch.inf)
        scores = torch.cat([scores, padded], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=wide).to(q.dtype)
    out = (shares[..., :t].reshape(r, kv, -1, t) @ v).view(r, kv, -1, t, d)
    for n, (_, value) in enumerate(chain):
        out = out + shares[..., t + n, None] * value.transpose(1, 2)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).reshape(r, t, h, d)


def query_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, wq: Tensor, q_norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `model.attention_inputs`, for a layer without keys: q and gate [N, H, D]."""
    d, turned = q_norm.shape[0], cos.shape[-1]
    y = linear(rms_norm(x, 1.0 + norm, eps), wq).view(x.shape[0], -1, 2 * d)
    q, gate = y.chunk(2, -1)
    q = rms_norm(q, 1.0 + q_norm, eps)
    first, second = q[..., :turned].chunk(2, -1)
    front = q[..., :turned] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([front, q[..., turned:]], -1), gate


class DraftHead(nn.Module):
    """One head: parameters in a flat dictionary under their checkpoint names, and its steps."""

    def __init__(self, name: str, shape: Shape, *, intermediate: int) -> None:
        super().__init__()
        self.name, self.shape, self.owns_kv = name, shape, name == MTP
        self.table: dict[str, nn.Parameter] = {}
        s, p = shape, "layers.0."
        size, kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self._matrix("fc", s.hidden, 2 * s.hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._add(norm, torch.zeros(s.hidden))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._add(p + norm, torch.zeros(s.hidden))
        self._matrix(p + "self_attn.q_proj", 2 * size, s.hidden)
        self._add(p + "self_attn.q_norm", torch.zeros(s.head_dim))
        if self.owns_kv:
            self._matrix(p + "self_attn.k_proj", kv_size, s.hidden)
            self._matrix(p + "self_attn.v_proj", kv_size, s.hidden)
            self._add(p + "self_attn.k_norm", torch.zeros(s.head_dim))
        self._matrix(p + "self_attn.o_proj", s.hidden, size)
        self._matrix(p + "mlp.gate_proj", intermediate, s.hidden)
        self._matrix(p + "mlp.up_proj", intermediate, s.hidden)
        self._matrix(p + "mlp.down_proj", s.hidden, intermediate)

    def _add(self, name: str, value: Tensor) -> None:
        full = f"{self.name}.{name}.weight"
        self.table[full] = nn.Parameter(value)
        self.register_parameter(full.replace(".", "/"), self.table[full])

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        self._add(name, torch.randn(rows, columns) * columns**-0.5)

    def _get(self, *names: str) -> list[Tensor]:
        return [self.table[f"{self.name}.{name}.weight"] for name in names]

    def _layer(self, *names: str) -> list[Tensor]:
        return self._get(*(f"layers.0.{name}" for name in names))

    @torch.no_grad()
    def start_from(self, weights: dict[str, Tensor], layer: int) -> None:
        """Copies the target's last attention layer and final norm in, where the shapes agree."""
        for name, parameter in self.table.items():
            other = name.replace(f"{self.name}.layers.0.", f"model.layers.{layer}.")
            other = other.replace(f"{self.name}.norm.", "model.norm.")
            if other in weights and weights[other].shape == parameter.shape:
                parameter.copy_(weights[other])

    def steps(self, rows: Rows, embed: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Outputs [R * T, hidden] of draft steps 1..num_steps, in the dtype of `rows.hidden`.

        Step k of anchor i stands at i and uses the token i+k-1 of the row, so it means nothing
        where that lies in another document. Logits are the output times `embed` [V, hidden].
        """
        shape, flat = self.shape, rows.position.flatten()
        mask = seen_pairs(rows.position) if self.owns_kv else seen_target(rows.position)
        memory = [] if self.owns_kv else [(rows.keys, rows.values)]  # shared, then the chain's
        last = rows.hidden.roll(1, 1).flatten(0, 1)  # h_{i-1}
        for k in range(num_steps):
            x = self._fuse(F.embedding(rows.later(k), embed).to(last.dtype), last)
            cos, sin = rotary(flat + (k if self.owns_kv else -1), shape, x.dtype)
            q, gate, pair = self._project(x, cos, sin)
            if pair:
                memory.append((rows.shaped(pair[0]), rows.shaped(pair[1])))
            o = chain_attention(rows.shaped(q), *memory[0], memory[1:], mask)
            names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            weights = self._layer("self_attn.o_proj", "post_attention_layernorm", *names)
            x = attention_outputs(x, o.flatten(0, 1), gate, *weights, shape.eps)
            last = rms_norm(x, 1.0 + self._get("norm")[0], shape.eps)
            yield last

    def _project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """q and gate [N, H, D], and the key and value [N, KV, D] of a head that has some."""
        if self.owns_kv:
            names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
            weights = self._layer("input_layernorm", *("self_attn." + n for n in names))
            q, k, v, gate = attention_inputs(x, cos, sin, *weights, self.shape.eps)
            return q, gate, (k, v)
        weights = self._layer("input_layernorm", "self_attn.q_proj", "self_attn.q_norm")
        return *query_inputs(x, cos, sin, *weights, self.shape.eps), None

    def _fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input from a token's embedding and a hidden state."""
        e_norm, h_norm, fc = self._get("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
        e = rms_norm(embedded, 1.0 + e_norm, self.shape.eps)
        h = rms_norm(hidden, 1.0 + h_norm, self.shape.eps)
        return linear(torch.cat([e, h], -1), fc)


def make_heads(shape: Shape, intermediate: dict[str, int]) -> dict[str, DraftHead]:
    """Both heads by name."""
    return {n: DraftHead(n, shape, intermediate=size) for n, size in intermediate.items()}

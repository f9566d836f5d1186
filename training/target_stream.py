"""The target one token at a time, for many rows at once, each at its own place.

Owns: keys and values, recurrent states and convolution windows of the rows, and one decode step.
Does not know: which token comes next, or when a row ends (`draft_tokens.py`).
Invariants: numbers are those of `model.Model` on the same document (`tests/training` compare); a
row whose position is 0 starts from nothing, whatever was there before. Slot `length` is a sink for
rows that have ended: what is written there is never seen by others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft_model import rotary
from model import (
    RESET_DECAY,
    Model,
    attention_inputs,
    attention_outputs,
    delta_outputs,
    linear,
    rms_norm,
)
from torch import Tensor


class TargetStream:
    """Caches for `rows` documents of at most `length` tokens; float32 arithmetic."""

    def __init__(self, model: Model, rows: int, length: int, *, kv_dtype: torch.dtype) -> None:
        self.model, self.rows, self.length = model, rows, length
        s, device = model.shape, next(model.parameters()).device
        kinds = [s.layer_type(i) for i in range(s.num_layers)]
        self.full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        shape = (rows, s.num_kv_heads, length + 1, s.head_dim)
        self.keys = {i: torch.zeros(shape, dtype=kv_dtype, device=device) for i in self.full}
        self.values = {i: torch.zeros(shape, dtype=kv_dtype, device=device) for i in self.full}
        recurrent = [i for i in range(s.num_layers) if i not in self.full]
        channels = (2 * s.num_k_heads + s.num_v_heads) * s.delta_dim
        state, window = (
            (rows, s.num_v_heads, s.delta_dim, s.delta_dim),
            (rows, s.conv_width - 1, channels),
        )
        self.states = {i: torch.zeros(state, device=device) for i in recurrent}
        self.windows = {i: torch.zeros(window, device=device) for i in recurrent}
        self.row_index = torch.arange(rows, device=device)
        self.slot_index = torch.arange(length + 1, device=device)

    def feed(self, ids: Tensor, position: Tensor) -> Tensor:
        """Consumes one token a row: int64[B] each -> hidden states [B, hidden], final norm done."""
        table, eps = self.model.table, self.model.shape.eps
        x = F.embedding(ids, table["model.embed_tokens.weight"])
        cos, sin = rotary(position, self.model.shape, x.dtype)
        for i in range(self.model.shape.num_layers):
            if i in self.keys:
                x = self._attention(i, x, position, cos, sin)
            else:
                x = self._delta(i, x, position)
        return rms_norm(x, 1.0 + table["model.norm.weight"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] of what `feed` returned."""
        return linear(hidden, self.model.table["model.embed_tokens.weight"])

    def _attention(self, i: int, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, model = self.model.shape, self.model
        names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        weights = model._weights(i, "input_layernorm", *("self_attn." + n for n in names))
        q, k, v, gate = attention_inputs(x, cos, sin, *weights, s.eps)
        keys, values = self.keys[i], self.values[i]
        keys[self.row_index, :, position] = k.to(keys.dtype)
        values[self.row_index, :, position] = v.to(values.dtype)
        q = q.view(self.rows, s.num_kv_heads, -1, s.head_dim).to(keys.dtype)
        scores = (q @ keys.mT).float() * s.head_dim**-0.5  # [B, KV, G, L]
        hidden = (self.slot_index > position[:, None])[:, None, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        o = (shares.to(values.dtype) @ values).to(x.dtype).view(self.rows, -1, s.head_dim)
        out = model._weights(i, "self_attn.o_proj")
        return attention_outputs(x, o, gate, *out, *model._mlp_weights(i), s.eps)

    def _delta(self, i: int, x: Tensor, position: Tensor) -> Tensor:
        s, model, first = self.model.shape, self.model, (position == 0)[:, None]
        names = ("in_proj_qkv", "conv1d", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
        weights = model._weights(i, "input_layernorm", *("linear_attn." + n for n in names))
        norm, qkv, conv, z_proj, b_proj, a_proj, a_log, dt_bias = weights
        y = rms_norm(x, 1.0 + norm, s.eps)
        old = self.windows[i].masked_fill_(first[..., None], 0.0)
        window = torch.cat([old, linear(y, qkv)[:, None]], 1)  # [B, width, C]
        self.windows[i] = window[:, 1:]
        mixed = F.silu((window * conv[:, 0].mT).sum(1))
        decay = -a_log.exp() * F.softplus(linear(y, a_proj) + dt_bias)
        decay = torch.where(first, RESET_DECAY, decay).exp()
        o = self._recur(i, mixed, decay, linear(y, b_proj).sigmoid())
        out = model._weights(i, "linear_attn.norm", "linear_attn.out_proj")
        z = linear(y, z_proj)
        return delta_outputs(x, o, z, *out, *model._mlp_weights(i), s.eps)

    def _recur(self, i: int, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """One step of the gated delta rule, in place; decay and beta [B, HV]. Returns [B, HV * D].

        S <- a S + k u, u = beta (v - a k S); o = q S, written so that the old S is read once.
        """
        s, state = self.model.shape, self.states[i]
        key, value = s.num_k_heads * s.delta_dim, s.num_v_heads * s.delta_dim
        q, k, v = (p.view(self.rows, -1, s.delta_dim) for p in mixed.split([key, key, value], -1))
        rep = s.num_v_heads // s.num_k_heads
        q, k = (F.normalize(p, dim=-1, eps=1e-6).repeat_interleave(rep, 1) for p in (q, k))
        q = q * s.delta_dim**-0.5
        from_k, from_q = (torch.stack([k, q], 2) @ state * decay[..., None, None]).unbind(2)
        u = (v - from_k) * beta[..., None]
        state.mul_(decay[..., None, None]).addcmul_(k[..., None], u[:, :, None])
        return (from_q + (q * k).sum(-1, keepdim=True) * u).flatten(1)

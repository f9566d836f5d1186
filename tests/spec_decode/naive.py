"""Draft heads written once more, from their definition, in float64 and without any cache."""

from __future__ import annotations

import torch

from hyradix.models.config import ModelConfig


class NaiveHead:
    """``weights``: by flat name, the head's and the target's embedding and output head."""

    def __init__(self, name: str, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.name = name
        own = {n[len(name) + 1 :]: w.double() for n, w in weights.items() if n.startswith(name)}
        self.own = {n.removeprefix("layers.0.").removesuffix(".weight"): w for n, w in own.items()}
        self.embedding = weights["model.embed_tokens.weight"].double()
        self.unembedding = weights.get("lm_head.weight", self.embedding).double()
        self.config = config

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        factor = (x.square().mean(-1, keepdim=True) + self.config.eps).rsqrt()
        return x * factor * (1 + self.own[name])

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: ``[T, heads, D]``; the first ``rotary_dim`` are turned, halves against each other."""
        size = self.config.rotary_dim
        powers = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = positions.double()[:, None, None] / self.config.rope_theta**powers
        a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def inputs(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.rms(self.embedding[tokens], "pre_fc_norm_embedding")
        before = self.rms(hidden.double(), "pre_fc_norm_hidden")
        return torch.cat([embedded, before], dim=1) @ self.own["fc"].T

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + mixed @ self.own["self_attn.o_proj"].T
        y = self.rms(x, "post_attention_layernorm")
        gate, up = y @ self.own["mlp.gate_proj"].T, y @ self.own["mlp.up_proj"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ self.own["mlp.down_proj"].T
        return self.rms(x, "norm")

    def query(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        both = x @ self.own["self_attn.q_proj"].T
        q, gate = both.reshape(1, config.num_heads, 2, config.head_dim).unbind(2)
        q = self.rotate(self.rms(q, "self_attn.q_norm"), torch.tensor([position]))
        return q[0], gate[0]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: ``[H, D]``; k, v: ``[n, Hkv, D]``."""
        group = q.shape[0] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)

    def mtp(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Pairs at columns 1, 2, ..: the output for the last, ``[hidden]``."""
        config = self.config
        x = self.inputs(tokens, hidden)
        y = self.rms(x, "input_layernorm")
        positions = torch.arange(1, len(tokens) + 1)
        shape = (len(tokens), config.num_kv_heads, config.head_dim)
        k = (y @ self.own["self_attn.k_proj"].T).reshape(shape)
        k = self.rotate(self.rms(k, "self_attn.k_norm"), positions)
        v = (y @ self.own["self_attn.v_proj"].T).reshape(shape)
        q, gate = self.query(y[-1:], len(tokens))
        mixed = self.attend(q, k, v) * gate.sigmoid()
        return self.finish(x[-1:], mixed.reshape(1, -1))[0]

    def frozen(self, token: int, hidden: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """k, v: ``[n, Hkv, D]``, the target's."""
        x = self.inputs([token], hidden[None])
        q, gate = self.query(self.rms(x, "input_layernorm"), len(k) - 1)
        mixed = self.attend(q, k.double(), v.double()) * gate.sigmoid()
        return self.finish(x, mixed.reshape(1, -1))[0]

    def logprobs(self, out: torch.Tensor) -> torch.Tensor:
        return (self.unembedding @ out).log_softmax(-1)

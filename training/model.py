"""The training twin of transformers' `Qwen3_5ForCausalLM` (text part), built for speed on one GPU.

Owns: the forward pass over packed documents, in pieces that compile once for every layer and
length.
Does not know: data, optimizer, files other than a checkpoint's weights.
Invariants: parameter names and numbers are those of the qwen3_5 layout (`tests/training` and
`check_model.py` compare logits); each document starts from an empty recurrent state, an empty
convolution window and sees only itself in attention, however many share a row. Rotary positions are
not reset: only their differences matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from delta_rule import RESET_DECAY, DeltaRule
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The numbers of the model; `config_kwargs` gives them under transformers' names."""

    vocab: int = 8192
    hidden: int = 320
    intermediate: int = 640
    num_layers: int = 8
    attention_every: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    num_k_heads: int = 4
    num_v_heads: int = 8
    delta_dim: int = 64
    conv_width: int = 4
    rotary_share: float = 0.25
    rope_theta: float = 100_000.0
    max_length: int = 8192
    eps: float = 1e-6

    def config_kwargs(self) -> dict:
        """Arguments of `Qwen3_5TextConfig`."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "layer_types": [self.layer_type(i) for i in range(self.num_layers)],
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "linear_key_head_dim": self.delta_dim,
            "linear_value_head_dim": self.delta_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_share,
                # sections of the rotary pairs for time, height and width: text has one position
                # for all three
                "mrope_section": self._mrope_section(),
                "mrope_interleaved": True,
            },
        }

    def _mrope_section(self) -> list[int]:
        pairs = int(self.head_dim * self.rotary_share) // 2
        return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]

    def layer_type(self, index: int) -> str:
        """The kind of layer `index` has."""
        is_full = (index + 1) % self.attention_every == 0
        return "full_attention" if is_full else "linear_attention"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32 or wider; `weight` is the factor."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product with a float32 master weight in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """x plus its feed-forward part."""
    y = rms_norm(x, 1.0 + norm, eps)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def delta_inputs(
    x: Tensor,
    position: Tensor,
    norm: Tensor,
    qkv: Tensor,
    conv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat tokens x [N, hidden] -> convolved qkv [N, C], z [N, V], g and beta [N, HV].

    The convolution looks back over the flat axis; a tap that would reach before its document's
    first token counts as zero, so row ends need no care.
    """
    y = rms_norm(x, 1.0 + norm, eps)
    raw = linear(y, qkv)
    kernel = conv[:, 0].to(raw.dtype)  # [C, width], the last tap is the current token
    mixed = raw * kernel[:, -1]
    for back in range(1, kernel.shape[1]):
        shifted = F.pad(raw, (0, 0, back, 0))[: raw.shape[0]]
        mixed = (
            mixed + torch.where((position >= back)[:, None], shifted, 0.0) * kernel[:, -1 - back]
        )
    decay = -a_log.float().exp() * F.softplus(linear(y, a).float() + dt_bias)
    decay = torch.where((position == 0)[:, None], RESET_DECAY, decay)
    return F.silu(mixed), linear(y, z), decay, linear(y, b).float().sigmoid()


def delta_outputs(
    x: Tensor,
    o: Tensor,
    z: Tensor,
    gated_norm: Tensor,
    out: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """Gated norm per head, output projection, residual and feed-forward part."""
    heads = o.view(*o.shape[:-1], -1, gated_norm.shape[0])
    y = rms_norm(heads, gated_norm, eps).float() * F.silu(z.float()).view(heads.shape)
    return mlp(x + linear(y.to(x.dtype).view(o.shape), out), norm, gate, up, down, eps)


def attention_inputs(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, hidden], cos and sin [N, R] -> q, gate [N, H, D], k and v [N, KV, D]."""
    d, rotary = q_norm.shape[0], cos.shape[-1]
    y = rms_norm(x, 1.0 + norm, eps)
    q, gate = linear(y, wq).view(x.shape[0], -1, 2 * d).chunk(2, -1)
    k, v = linear(y, wk).view(x.shape[0], -1, d), linear(y, wv).view(x.shape[0], -1, d)

    def rotate(h: Tensor) -> Tensor:
        turned, rest = h[..., :rotary], h[..., rotary:]
        first, second = turned.chunk(2, -1)
        turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
        return torch.cat([turned, rest], -1)

    q = rotate(rms_norm(q, 1.0 + q_norm, eps))
    k = rotate(rms_norm(k, 1.0 + k_norm, eps))
    return q, k, v, gate


def attention_outputs(
    x: Tensor,
    o: Tensor,
    gate_in: Tensor,
    out: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """Gate, output projection, residual and feed-forward part; o and gate_in [N, H, D]."""
    y = (o * gate_in.sigmoid()).flatten(1)
    return mlp(x + linear(y, out), norm, gate, up, down, eps)


def token_losses(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Float32 loss per flat token [N]; 0 where the target is -100."""
    logits = linear(rms_norm(x, 1.0 + norm, eps), embed)
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="none")


class Pieces:
    """The functions above, as they are or compiled; all layers share them."""

    def __init__(self, *, compiled: bool) -> None:
        def wrap(function: Callable) -> Callable:
            return torch.compile(function, dynamic=False) if compiled else function

        self.delta_inputs, self.delta_outputs = wrap(delta_inputs), wrap(delta_outputs)
        self.attention_inputs, self.attention_outputs = (
            wrap(attention_inputs),
            wrap(attention_outputs),
        )
        self.token_losses = wrap(token_losses)


def _parameter(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * std)


class Model(nn.Module):
    """Parameters in a flat dictionary under their checkpoint names, and the packed forward pass."""

    def __init__(self, shape: Shape, *, pieces: Pieces, delta_rule: DeltaRule) -> None:
        super().__init__()
        self.shape, self.pieces, self.delta_rule = shape, pieces, delta_rule
        self.table: dict[str, nn.Parameter] = {}
        self._add("embed_tokens.weight", _parameter(shape.vocab, shape.hidden, std=0.02))
        self._add("norm.weight", nn.Parameter(torch.zeros(shape.hidden)))
        for i in range(shape.num_layers):
            self._add_layer(i)
        self.pairs = int(shape.head_dim * shape.rotary_share) // 2

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self.table["model." + name] = parameter
        self.register_parameter(("model." + name).replace(".", "/"), parameter)

    def _matrix(self, name: str, rows: int, columns: int, *, scale: float = 1.0) -> None:
        self._add(name, _parameter(rows, columns, std=scale * columns**-0.5))

    def _add_layer(self, i: int) -> None:
        s, p = self.shape, f"layers.{i}."
        depth = (2 * s.num_layers) ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._add(f"{p}{name}.weight", nn.Parameter(torch.zeros(s.hidden)))
        if s.layer_type(i) == "linear_attention":
            p += "linear_attn."
            key, value = s.num_k_heads * s.delta_dim, s.num_v_heads * s.delta_dim
            self._matrix(f"{p}in_proj_qkv.weight", 2 * key + value, s.hidden)
            self._add(f"{p}conv1d.weight", _parameter(2 * key + value, 1, s.conv_width, std=0.3))
            self._matrix(f"{p}in_proj_z.weight", value, s.hidden)
            self._matrix(f"{p}in_proj_b.weight", s.num_v_heads, s.hidden, scale=0.3)
            self._matrix(f"{p}in_proj_a.weight", s.num_v_heads, s.hidden, scale=0.3)
            # Decay rates spread over memories of a few to about a thousand tokens.
            rates = torch.logspace(math.log10(0.001), math.log10(0.3), s.num_v_heads)
            self._add(f"{p}A_log", nn.Parameter(torch.log(torch.linspace(1.0, 8.0, s.num_v_heads))))
            steps = rates / torch.linspace(1.0, 8.0, s.num_v_heads)
            self._add(f"{p}dt_bias", nn.Parameter(torch.log(torch.expm1(steps))))
            self._add(f"{p}norm.weight", nn.Parameter(torch.ones(s.delta_dim)))
            self._matrix(f"{p}out_proj.weight", s.hidden, value, scale=depth)
        else:
            p += "self_attn."
            self._matrix(f"{p}q_proj.weight", 2 * s.num_heads * s.head_dim, s.hidden)
            self._matrix(f"{p}k_proj.weight", s.num_kv_heads * s.head_dim, s.hidden)
            self._matrix(f"{p}v_proj.weight", s.num_kv_heads * s.head_dim, s.hidden)
            self._matrix(f"{p}o_proj.weight", s.hidden, s.num_heads * s.head_dim, scale=depth)
            self._add(f"{p}q_norm.weight", nn.Parameter(torch.zeros(s.head_dim)))
            self._add(f"{p}k_norm.weight", nn.Parameter(torch.zeros(s.head_dim)))
        p = f"layers.{i}.mlp."
        self._matrix(f"{p}gate_proj.weight", s.intermediate, s.hidden)
        self._matrix(f"{p}up_proj.weight", s.intermediate, s.hidden)
        self._matrix(f"{p}down_proj.weight", s.hidden, s.intermediate, scale=depth)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Copies checkpoint weights in, leaving aside draft-head (`mtp.`) and tied head entries."""
        missing = [name for name in self.table if name not in weights]
        if missing:
            raise ValueError(f"the checkpoint lacks {missing[:3]} and {len(missing)} in all")
        with torch.no_grad():
            for name, parameter in self.table.items():
                parameter.copy_(weights[name])

    def _rotary(
        self, rows: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        power = torch.arange(self.pairs, device=device, dtype=torch.float32) / self.pairs
        angle = torch.outer(
            torch.arange(length, device=device, dtype=torch.float32), self.shape.rope_theta**-power
        )
        angle = torch.cat([angle, angle], -1).repeat(rows, 1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def hidden(self, ids: Tensor, position: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Last hidden states, flat [R * T, hidden], before the final norm.

        Args: ids int64[R, T]; position int64[R, T], the place of each token in its document.
        """
        s, (rows, length) = self.shape, ids.shape
        flat = position.reshape(-1)
        cos, sin = self._rotary(rows, length, ids.device, dtype)
        document = (position == 0).cumsum(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
        x = F.embedding(ids.reshape(-1), self.table["model.embed_tokens.weight"]).to(dtype)
        for i in range(s.num_layers):
            block = (
                self._delta_layer
                if s.layer_type(i) == "linear_attention"
                else self._attention_layer
            )
            x = block(i, x, rows, flat, cos, sin, mask)
        return x

    def _weights(self, layer: int, *names: str) -> list[Tensor]:
        prefix = f"model.layers.{layer}."
        return [
            self.table[prefix + (n if n.endswith(("A_log", "dt_bias")) else n + ".weight")]
            for n in names
        ]

    def _mlp_weights(self, layer: int) -> list[Tensor]:
        return self._weights(
            layer, "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
        )

    def _delta_layer(
        self, i: int, x: Tensor, rows: int, flat: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        s = self.shape
        names = ("in_proj_qkv", "conv1d", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
        weights = self._weights(i, "input_layernorm", *("linear_attn." + n for n in names))
        mixed, z, g, beta = self.pieces.delta_inputs(x, flat, *weights, s.eps)
        key, value = s.num_k_heads * s.delta_dim, s.num_v_heads * s.delta_dim
        q, k, v = (
            part.reshape(rows, -1, part.shape[-1] // s.delta_dim, s.delta_dim)
            for part in mixed.split([key, key, value], -1)
        )
        o = self.delta_rule(
            q, k, v, g.view(rows, -1, s.num_v_heads), beta.view(rows, -1, s.num_v_heads)
        )
        out = self._weights(i, "linear_attn.norm", "linear_attn.out_proj")
        return self.pieces.delta_outputs(
            x, o.reshape(x.shape[0], -1), z, *out, *self._mlp_weights(i), s.eps
        )

    def _attention_layer(
        self, i: int, x: Tensor, rows: int, flat: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        s = self.shape
        names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        weights = self._weights(i, "input_layernorm", *("self_attn." + n for n in names))
        q, k, v, gate = self.pieces.attention_inputs(x, cos, sin, *weights, s.eps)
        q, k, v = (h.view(rows, -1, *h.shape[1:]).transpose(1, 2) for h in (q, k, v))
        rep = s.num_heads // s.num_kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = o.transpose(1, 2).reshape(x.shape[0], s.num_heads, s.head_dim)
        out = self._weights(i, "self_attn.o_proj")
        return self.pieces.attention_outputs(x, o, gate, *out, *self._mlp_weights(i), s.eps)

    def losses(
        self, ids: Tensor, position: Tensor, targets: Tensor, *, dtype: torch.dtype
    ) -> Tensor:
        """Loss per flat token, 0 where `targets` is -100."""
        x = self.hidden(ids, position, dtype=dtype)
        norm, embed = self.table["model.norm.weight"], self.table["model.embed_tokens.weight"]
        return self.pieces.token_losses(x, norm, embed, targets.reshape(-1), self.shape.eps)

    def logits(self, ids: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Logits [R, T, V] of rows that hold one document each (for checks)."""
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = rms_norm(
            self.hidden(ids, position, dtype=dtype),
            1.0 + self.table["model.norm.weight"],
            self.shape.eps,
        )
        return linear(x, self.table["model.embed_tokens.weight"]).view(*ids.shape, -1)

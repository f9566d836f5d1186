"""The teacher: a Llama checkpoint in GGUF form, and batched sampling from it in plain PyTorch.

Owns: reading the GGUF file (weights and byte-level BPE tokenizer), prefill, decode, sampling.
Does not know: which prompts are worth asking, which replies are worth keeping (`teacher.py`).
Invariant: rows of one wave are padded on the left, so every row writes its cache at one position.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor


@dataclass(frozen=True)
class LlamaShape:
    """The numbers of a Llama checkpoint."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    eps: float


def read_gguf(path: str) -> tuple[LlamaShape, dict[str, Tensor], Tokenizer]:
    """Reads shape, float32 weights (GGUF names) and tokenizer from a GGUF file.

    The q and k rows of a Llama GGUF are stored for interleaved rotary pairs; they are put back into
    the half-split order, so that rotary is `x * cos + rotate_half(x) * sin`.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def meta(key: str):
        return reader.fields[key].contents()

    heads, kv_heads = meta("llama.attention.head_count"), meta("llama.attention.head_count_kv")
    hidden = meta("llama.embedding_length")
    shape = LlamaShape(
        num_layers=meta("llama.block_count"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rope_base=float(meta("llama.rope.freq_base")),
        eps=float(meta("llama.attention.layer_norm_rms_epsilon")),
    )
    weights: dict[str, Tensor] = {}
    for item in reader.tensors:
        value = torch.from_numpy(dequantize(item.data, item.tensor_type).copy()).float()
        for name, n in (("attn_q", heads), ("attn_k", kv_heads)):
            if f".{name}." in item.name:
                half = shape.head_dim // 2
                value = value.view(n, half, 2, hidden).transpose(1, 2).reshape(-1, hidden)
        weights[item.name] = value
    tokens, merges = meta("tokenizer.ggml.tokens"), meta("tokenizer.ggml.merges")
    kinds = meta("tokenizer.ggml.token_type")
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return shape, weights, tokenizer


class Teacher:
    """Batched sampling. `generate` is the only public method."""

    def __init__(
        self, shape: LlamaShape, weights: dict[str, Tensor], *, device: str, dtype: torch.dtype
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

        def take(name: str) -> Tensor:
            return weights[name].to(device=device, dtype=dtype)

        self.embed = take("token_embd.weight")
        self.final_norm = take("output_norm.weight")
        self.layers = []
        for i in range(shape.num_layers):
            p = f"blk.{i}."
            parts = [take(f"{p}attn_{n}.weight") for n in "qkv"]
            gate_up = [take(f"{p}ffn_{n}.weight") for n in ("gate", "up")]
            self.layers.append(
                (
                    take(f"{p}attn_norm.weight"),
                    torch.cat(parts),
                    take(f"{p}attn_output.weight"),
                    take(f"{p}ffn_norm.weight"),
                    torch.cat(gate_up),
                    take(f"{p}ffn_down.weight"),
                )
            )
        half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        self.inv_freq = shape.rope_base ** (-half / shape.head_dim)
        self.sample: Callable[..., Tensor] = sample_min_p
        self.attend = attend_bmm
        if device == "cuda":
            self._choose_kernels()

    def _choose_kernels(self) -> None:
        """Times both decode attentions and tries to compile the sampler; logs what falls back."""
        s = self.shape
        q = torch.randn(4096 * s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim)
        q = q.to(self.device, self.dtype)
        k = torch.randn(q.shape[0], 128, s.head_dim, device=self.device, dtype=self.dtype)
        bias = torch.zeros(4096, 128, device=self.device, dtype=self.dtype)
        times = {}
        expected = attend_bmm(q, k, k, bias, s.num_kv_heads)
        for attend in (attend_bmm, attend_sdpa):
            try:
                got = attend(q, k, k, bias, s.num_kv_heads)
                assert torch.allclose(got, expected, atol=0.05), "attention differs"
                for n in range(6):
                    if n == 1:
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                    attend(q, k, k, bias, s.num_kv_heads)
                torch.cuda.synchronize()
                times[attend.__name__] = (time.perf_counter() - start, attend)
            except Exception as error:  # a kernel this build lacks: the other one serves
                print(f"teacher: {attend.__name__} unusable: {error}", file=sys.stderr)
        self.attend = min(times.values(), key=lambda pair: pair[0])[1]
        print("teacher: decode attention", {n: f"{t[0] / 5e-3:.3f} ms" for n, t in times.items()})
        try:
            fast = torch.compile(sample_min_p, dynamic=True)
            logits = torch.randn(512, self.embed.shape[0], device=self.device, dtype=self.dtype)
            logits[:, 7] = 30.0
            with torch.inference_mode():
                for rows in (512, 300):
                    assert (fast(logits[:rows], 0.7, 0.1) == 7).all()
                flat = torch.zeros_like(logits)
                first, second = fast(flat, 1.0, 0.5), fast(flat, 1.0, 0.5)
            assert first.unique().numel() > 400, "sampler is not random"
            assert not torch.equal(first, second), "sampler repeats"
            self.sample = fast
        except Exception as error:
            print(f"teacher: sampler stays uncompiled: {error}", file=sys.stderr)

    def _rotary(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        t = torch.arange(start, start + length, device=self.device, dtype=torch.float32)
        angle = torch.outer(t, self.inv_freq)
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _mlp(self, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], norm, self.shape.eps), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    def _qkv(self, x: Tensor, norm: Tensor, w: Tensor, cos: Tensor, sin: Tensor):
        """Returns q [B, T, H, D], k and v [B, T, KV, D], rotated."""
        s = self.shape
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], norm, s.eps), w)
        qkv = qkv.view(*x.shape[:2], s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        qk, v = qkv[:, :, : -s.num_kv_heads], qkv[:, :, -s.num_kv_heads :]
        a, b = qk.chunk(2, -1)
        qk = qk * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
        return qk[:, :, : s.num_heads], qk[:, :, s.num_heads :], v

    def _prefill(self, ids: Tensor, pad: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Fills cache rows for `ids` [B, P] (`pad` True at left padding); returns logits [B, V]."""
        s, (b, p) = self.shape, ids.shape
        cos, sin = self._rotary(0, p)
        causal = torch.ones(p, p, dtype=torch.bool, device=self.device).tril()
        mask = (causal & ~pad[:, None, :]) | torch.eye(p, dtype=torch.bool, device=self.device)
        x = F.embedding(ids, self.embed)
        for i, (n1, w_qkv, w_o, n2, w_gu, w_d) in enumerate(self.layers):
            q, k, v = (t.transpose(1, 2) for t in self._qkv(x, n1, w_qkv, cos, sin))
            k_cache[i].view(b, s.num_kv_heads, -1, s.head_dim)[:, :, :p] = k
            v_cache[i].view(b, s.num_kv_heads, -1, s.head_dim)[:, :, :p] = v
            rep = s.num_heads // s.num_kv_heads
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            x = x + F.linear(o.transpose(1, 2).reshape(b, p, -1), w_o)
            x = self._mlp(x, n2, w_gu, w_d)
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], self.final_norm, s.eps), self.embed)

    def _decode(
        self, ids: Tensor, t: int, bias: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """One token [B] at position t; `bias` [B, S] is -inf at padding and at the future."""
        s, b = self.shape, ids.shape[0]
        n = min((t + 16) // 16 * 16, k_cache.shape[2])
        cos, sin = self._rotary(t, 1)
        x = F.embedding(ids, self.embed)[:, None]
        for i, (n1, w_qkv, w_o, n2, w_gu, w_d) in enumerate(self.layers):
            q, k, v = self._qkv(x, n1, w_qkv, cos, sin)
            k_cache[i][:, t] = k.reshape(-1, s.head_dim)
            v_cache[i][:, t] = v.reshape(-1, s.head_dim)
            q = q.reshape(b * s.num_kv_heads, -1, s.head_dim)
            o = self.attend(q, k_cache[i][:, :n], v_cache[i][:, :n], bias[:, :n], s.num_kv_heads)
            x = x + F.linear(o.reshape(b, 1, -1), w_o)
            x = self._mlp(x, n2, w_gu, w_d)
        return F.linear(F.rms_norm(x[:, 0], x.shape[-1:], self.final_norm, s.eps), self.embed)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new: int,
        stop: int,
        temperature: float,
        min_p: float,
        prefill_rows: int = 1024,
        give_up_share: float = 0.03,
    ) -> list[list[int] | None]:
        """Samples one continuation per prompt; None where it did not end with `stop` in time.

        The last few rows (`give_up_share` of the wave) are abandoned: they cost whole steps.
        """
        s, rows = self.shape, len(prompts)
        p = (max(map(len, prompts)) + 7) // 8 * 8
        size = (p + max_new + 15) // 16 * 16
        ids = torch.full((rows, p), stop, dtype=torch.long)
        pad = torch.ones(rows, p, dtype=torch.bool)
        for r, prompt in enumerate(prompts):
            ids[r, p - len(prompt) :] = torch.tensor(prompt)
            pad[r, p - len(prompt) :] = False
        ids, pad = ids.to(self.device), pad.to(self.device)
        cache = [
            torch.zeros(
                (s.num_layers, rows * s.num_kv_heads, size, s.head_dim),
                device=self.device,
                dtype=self.dtype,
            )
            for _ in range(2)
        ]
        logits = []
        for a in range(0, rows, prefill_rows):
            z = min(a + prefill_rows, rows)
            cut = slice(a * s.num_kv_heads, z * s.num_kv_heads)
            logits.append(self._prefill(ids[a:z], pad[a:z], cache[0][:, cut], cache[1][:, cut]))
        bias = torch.full((rows, size), float("-inf"), device=self.device, dtype=self.dtype)
        bias[:, :p].masked_fill_(~pad, 0.0)
        token = self.sample(torch.cat(logits), temperature, min_p)
        alive = torch.arange(rows, device=self.device)
        out = torch.full((rows, max_new), -1, dtype=torch.long, device=self.device)
        done = torch.zeros(rows, dtype=torch.bool, device=self.device)
        for step in range(max_new):
            out[alive, step] = token
            done |= token == stop
            t = p + step
            if step % 8 == 7:
                num_alive = int((~done).sum())
                if num_alive <= give_up_share * rows:
                    break
                if num_alive < 0.75 * alive.numel():
                    keep = (~done).nonzero()[:, 0]
                    alive, token, bias = alive[keep], token[keep], bias[keep]
                    heads = keep[:, None] * s.num_kv_heads
                    heads = (heads + torch.arange(s.num_kv_heads, device=self.device)).flatten()
                    cache = [torch.stack([layer[heads] for layer in c]) for c in cache]
                    done = torch.zeros_like(keep, dtype=torch.bool)
            if step + 1 == max_new:
                break
            bias[:, t] = 0.0
            token = self.sample(self._decode(token, t, bias, *cache), temperature, min_p)
        replies: list[list[int] | None] = []
        for row in out.tolist():
            replies.append(row[: row.index(stop)] if stop in row else None)
        return replies


def sample_min_p(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    """Samples from [B, V] among tokens at least `min_p` times as likely as the best one."""
    scaled = logits.float() / temperature
    probs = (scaled - scaled.amax(-1, keepdim=True)).exp()
    noise = -torch.log(1.0 - torch.rand_like(probs) + 1e-20)
    return torch.where(probs >= min_p, probs / noise.clamp_min(1e-20), 0.0).argmax(-1)


def attend_bmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, num_kv_heads: int) -> Tensor:
    """q [B*KV, G, D], k and v [B*KV, n, D], bias [B, n] -> [B*KV, G, D]."""
    scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
    b, n = bias.shape
    scores = scores.view(b, num_kv_heads, -1, n) + bias[:, None, None]
    probs = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(probs.view(b * num_kv_heads, -1, n), v)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, num_kv_heads: int) -> Tensor:
    """As `attend_bmm`, the query heads of one group standing in for query positions."""
    b, n = bias.shape
    g, d = q.shape[1:]
    split = [x.view(b, num_kv_heads, -1, d) for x in (q, k, v)]
    mask = bias[:, None, None].expand(b, num_kv_heads, g, n)
    return F.scaled_dot_product_attention(*split, attn_mask=mask).reshape(b * num_kv_heads, g, d)

"""A tiny target with heads, and the heads' slow twin: one position at a time, float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from draft_model import DraftHead, Rows, make_heads
from model import Model, Pieces, Shape, delta_rule_torch
from torch import Tensor

TINY = Shape(
    vocab=97,
    hidden=48,
    intermediate=72,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    num_k_heads=2,
    num_v_heads=6,
    delta_dim=16,
    max_length=512,
)
SIZES = {"mtp": 72, "frozen_kv_mtp": 40}


def tiny_target(*, noise: float = 0.1) -> Model:
    """Random weights that a bf16 file holds exactly, norms too, so that mistakes show."""
    torch.manual_seed(0)
    model = Model(TINY, pieces=Pieces(compiled=False), delta_rule=delta_rule_torch)
    with torch.no_grad():
        for parameter in model.table.values():
            parameter.add_(torch.randn_like(parameter) * noise)
            parameter.copy_(parameter.bfloat16())
    return model.requires_grad_(False)


def tiny_heads() -> dict[str, DraftHead]:
    """Both heads in float64."""
    torch.manual_seed(1)
    heads = make_heads(TINY, SIZES)
    with torch.no_grad():
        for head in heads.values():
            for parameter in head.table.values():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return {name: head.double() for name, head in heads.items()}


def random_rows(documents: list[int], rows: int = 2) -> tuple[Rows, Tensor]:
    """Packed documents of these sizes with made-up outputs of a target; and an embedding."""
    length = sum(documents)
    torch.manual_seed(2)
    position = torch.cat([torch.arange(n) for n in documents]).expand(rows, -1)
    ids = torch.randint(1, TINY.vocab, (rows, length))
    hidden = torch.randn(rows, length, TINY.hidden, dtype=torch.float64)
    kv = (rows, length, TINY.num_kv_heads, TINY.head_dim)
    keys, values = (torch.randn(kv, dtype=torch.float64) for _ in range(2))
    embed = torch.randn(TINY.vocab, TINY.hidden, dtype=torch.float64)
    return Rows(ids, position, hidden, keys, values), embed


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + TINY.eps).sqrt() * (1.0 + weight)


def _turn(x: Tensor, position: int) -> Tensor:
    """The first quarter of a head's numbers turned in pairs by the position."""
    half = int(TINY.head_dim * TINY.rotary_share) // 2
    out = x.clone()
    for n in range(half):
        angle = position * TINY.rope_theta ** (-n / half)
        a, b = x[n], x[n + half]
        out[n] = a * math.cos(angle) - b * math.sin(angle)
        out[n + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class NaiveChain:
    """Drafts after n consumed tokens of one document, as serving does it.

    ids: the consumed tokens. hidden [n, hidden], keys and values [n, KV, D]: the target's.
    """

    def __init__(
        self,
        head: DraftHead,
        ids: list[int],
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        embed: Tensor,
    ) -> None:
        self.head, self.embed, self.count = head, embed, len(ids)
        self.last, self.done = hidden[-1], 0
        self.memory = [(keys[j], values[j]) for j in range(len(ids))]
        if head.owns_kv:
            pairs = [self._fuse(ids[j], hidden[j - 1]) for j in range(1, len(ids))]
            self.memory = [self._own(x, j) for j, x in enumerate(pairs, start=1)]

    def _w(self, name: str) -> Tensor:
        return self.head.table[f"{self.head.name}.{name}.weight"].detach()

    def _fuse(self, token: int, hidden: Tensor) -> Tensor:
        e = _norm(self.embed[token], self._w("pre_fc_norm_embedding"))
        h = _norm(hidden, self._w("pre_fc_norm_hidden"))
        return self._w("fc") @ torch.cat([e, h])

    def _own(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        y, p = _norm(x, self._w("layers.0.input_layernorm")), "layers.0.self_attn."
        k = (self._w(p + "k_proj") @ y).view(TINY.num_kv_heads, -1)
        k = torch.stack([_turn(_norm(one, self._w(p + "k_norm")), position) for one in k])
        return k, (self._w(p + "v_proj") @ y).view(TINY.num_kv_heads, -1)

    def step(self, token: int) -> Tensor:
        """The output after one more token, the root first; logits are the embedding times it."""
        x = self._fuse(token, self.last)
        position = self.count + self.done if self.head.owns_kv else self.count - 1
        if self.head.owns_kv:
            self.memory.append(self._own(x, position))
        y, p = _norm(x, self._w("layers.0.input_layernorm")), "layers.0.self_attn."
        mixed = []
        for h, row in enumerate((self._w(p + "q_proj") @ y).view(TINY.num_heads, -1)):
            q, gate = row[: TINY.head_dim], row[TINY.head_dim :]
            q = _turn(_norm(q, self._w(p + "q_norm")), position)
            group = h // (TINY.num_heads // TINY.num_kv_heads)
            scores = torch.stack([k[group] @ q for k, _ in self.memory]) * TINY.head_dim**-0.5
            found = zip(scores.softmax(0), self.memory, strict=True)
            mixed.append(sum(share * v[group] for share, (_, v) in found) * gate.sigmoid())
        x = x + self._w(p + "o_proj") @ torch.cat(mixed)
        y = _norm(x, self._w("layers.0.post_attention_layernorm"))
        gate, up = self._w("layers.0.mlp.gate_proj") @ y, self._w("layers.0.mlp.up_proj") @ y
        x = x + self._w("layers.0.mlp.down_proj") @ (gate * gate.sigmoid() * up)
        self.last = _norm(x, self._w("norm"))
        self.done += 1
        return self.last


def naive_rounds(
    start: Callable[[int], NaiveChain], reply: list[int], first: int, chain: int
) -> int:
    """Rounds of real drafting through `reply`, whose token at index 0 stands at place `first`."""
    at, rounds = 0, 0
    while at < len(reply) - 1:
        drafter, token, accepted = start(first + at), reply[at], 0
        while accepted < min(chain, len(reply) - 1 - at):
            token = int((drafter.embed @ drafter.step(token)).argmax())
            if token != reply[at + accepted + 1]:
                break
            accepted += 1
        at += min(accepted + 1, len(reply) - 1 - at)
        rounds += 1
    return rounds

"""A tiny target with heads, and drafting one position at a time, by the engine's definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from delta_rule import delta_rule_torch
from draft_model import DraftHead, Rows, make_heads
from model import Model, Pieces, Shape
from torch import Tensor

from hyradix.models.qwen3_5 import parse_config
from tests.spec_decode.naive import NaiveHead

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


def naive_head(head: DraftHead, embed: Tensor) -> NaiveHead:
    """The same head as the tests of the engine's proposers define it."""
    raw = {"model_type": "qwen3_5_text", **TINY.config_kwargs()}
    weights = {name: parameter.detach() for name, parameter in head.table.items()}
    weights["model.embed_tokens.weight"] = embed
    return NaiveHead(head.name, parse_config(raw, {}), weights)


class NaiveChain:
    """Drafts after n consumed tokens of one document, as serving does it.

    ids: the consumed tokens. hidden [n, hidden], keys and values [n, KV, D]: the target's.
    """

    def __init__(
        self, head: NaiveHead, ids: list[int], hidden: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self.head, self.ids, self.hidden = head, list(ids), list(hidden)
        self.kv = keys, values

    def step(self, token: int) -> Tensor:
        """The output after one more token, the root first; logits are the embedding times it."""
        self.ids.append(token)
        if self.head.name == "mtp":
            out = self.head.mtp(self.ids[1:], torch.stack(self.hidden))
        else:
            out = self.head.frozen(token, self.hidden[-1], *self.kv)
        self.hidden.append(out)
        return out


def naive_rounds(
    start: Callable[[int], NaiveChain], reply: list[int], first: int, chain: int
) -> int:
    """Rounds of real drafting through `reply`, whose token at index 0 stands at place `first`."""
    at, rounds = 0, 0
    while at < len(reply) - 1:
        drafter, token, accepted = start(first + at), reply[at], 0
        while accepted < min(chain, len(reply) - 1 - at):
            token = int(drafter.head.logprobs(drafter.step(token)).argmax())
            if token != reply[at + accepted + 1]:
                break
            accepted += 1
        at += min(accepted + 1, len(reply) - 1 - at)
        rounds += 1
    return rounds

"""Rows that consume tokens, with a proposer beside them: a runner without a target.

The target's hidden states are random vectors, its KV random numbers: a proposer cannot tell. All
memory that a row does not own is NaN, or watched for writes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from hyradix.kernels.ops import load_ops
from hyradix.layers.context import LayerMemory
from hyradix.models.decoder import Decoder
from hyradix.models.loader import build_model, init_random, load_config
from hyradix.request import slot_order
from hyradix.spec_config import DraftShape
from hyradix.spec_decode.build import build_proposer
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound
from tests.spec_decode.naive import NaiveHead
from tests.support.checkpoints import COMMON

CONFIG = {
    "model_type": "qwen3_5_text",
    "linear_conv_kernel_dim": 4,
    **COMMON,
    "num_hidden_layers": 8,
    "tie_word_embeddings": True,
    "draft_heads": {"mtp": {"intermediate_size": 56}, "frozen_kv_mtp": {"intermediate_size": 32}},
}
WIDTH = 96
NUM_SLOTS = 400


def random_weights(config: Any, head: Any) -> dict[str, torch.Tensor]:
    """Larger than ``init_random``'s, norms included, so that mistakes show."""
    tensors = init_random(config, 3, head=head)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.startswith(head) or "embed" in name:
            scale = 0.3 if "norm" in name else 0.15
            tensor.normal_(0.0, scale, generator=generator)
    return tensors


def make_model(directory: Any, head: Any, backend: str) -> tuple[Decoder, NaiveHead]:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(directory)
    tensors = random_weights(config, head)
    naive = NaiveHead(head, config, {name: tensor.clone() for name, tensor in tensors.items()})
    model = build_model(config, tensors, load_ops(backend), max_context=WIDTH, head=head)
    return model, naive


class World:
    """``tokens[row]``, ``hidden[row]``: all that the row will know; ``done[row]``: consumed."""

    def __init__(self, name: Any, model: Decoder, *, num_rows: int = 4, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.model, config = model, model.config
        self.config = config
        layers = config.num_attention_layers + (name == "mtp")
        shape = (layers, NUM_SLOTS + 1, config.num_kv_heads, config.head_dim)
        self.k, self.v = (torch.full(shape, torch.nan) for _ in "kv")
        self.token_ids = np.zeros((num_rows, WIDTH), np.int32)
        self.free = self.random.permutation(np.arange(1, NUM_SLOTS + 1)).astype(np.int32).tolist()
        self.kv_slots = self.random.integers(1, NUM_SLOTS, (num_rows, WIDTH)).astype(np.int32)
        self.hidden = torch.full((num_rows, WIDTH, config.hidden_size), torch.nan)
        self.done = np.zeros(num_rows, np.int32)
        self.owned = np.zeros(num_rows, np.int32)
        memory = LayerMemory(
            tuple(map(model.ops.view, self.k)), tuple(map(model.ops.view, self.v)), (), ()
        )
        self.proposer = build_proposer(name, model, self.token_ids, self.kv_slots, memory)

    def draw_hidden(self, count: int) -> torch.Tensor:
        drawn = self.random.standard_normal((count, self.config.hidden_size))
        return torch.from_numpy(drawn.astype(np.float32))

    def enter(self, row: int, prompt: list[int], *, like: int | None = None, state: int = 0,
              shared: int = 0) -> None:  # fmt: skip
        """``like``: the first ``shared`` slots are that row's; it resumes from ``state``."""
        self.hidden[row, shared : len(prompt)] = self.draw_hidden(len(prompt) - shared)
        if like is not None:
            assert prompt[:shared] == self.token_ids[like, :shared].tolist()
            self.hidden[row, :shared] = self.hidden[like, :shared]
            self.kv_slots[row, :shared] = self.kv_slots[like, :shared]
        self.token_ids[row, : len(prompt)] = prompt
        self.owned[row] = shared
        self.done[row] = state
        self.proposer.enter(row, state, self.hidden[row, state - 1] if state else None)

    def own(self, row: int, end: int) -> None:
        """Slots of the row's own up to column ``end``; their memory stays NaN."""
        while self.owned[row] < end:
            self.kv_slots[row, self.owned[row]] = self.free.pop()
            self.owned[row] += 1

    def consume(
        self,
        work: dict[int, int],
        *,
        write_from: dict[int, int] | None = None,
        sampled: dict[int, int] | None = None,
        no_slot: tuple[int, ...] = (),
    ) -> None:
        """Rows consume so many tokens; ``sampled``: the next token of a row, put in its table."""
        rows = np.array(list(work), np.int32)
        starts = self.done[rows]
        ends = starts + np.array(list(work.values()), np.int32)
        next_slots = np.zeros(len(rows), np.int32)
        layer = self.config.num_attention_layers - 1
        for i, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            self.own(row, end)
            fresh = slice(max(int(starts[i]), (write_from or {}).get(row, 0)), end)
            size = self.k[layer, self.kv_slots[row, fresh]].shape
            for pool in (self.k, self.v):  # as the target would
                numbers = self.random.standard_normal(size).astype(np.float32)
                pool[layer, self.kv_slots[row, fresh].astype(np.int64)] = torch.from_numpy(numbers)
            if sampled and row in sampled:
                self.token_ids[row, end] = sampled[row]
                self.hidden[row, end] = self.draw_hidden(1)[0]
                if row not in no_slot:
                    self.own(row, end + 1)
                    next_slots[i] = self.kv_slots[row, end]
        parts = [self.hidden[row, a:b] for row, a, b in zip(rows, starts, ends, strict=True)]
        first = np.array([(write_from or {}).get(row, 0) for row in rows.tolist()], np.int32)
        hidden = self.model.ops.view(torch.cat(parts))
        step = ConsumedTokens(rows, starts, ends, np.maximum(first, starts), next_slots, hidden)
        allowed = {row: range(int(a), int(b) + 1)
                   for row, a, b in zip(rows, step.write_from, ends, strict=True)}  # fmt: skip
        with Watch(self, allowed):
            self.proposer.learn(step)
        self.done[rows] = ends

    def propose(self, rows: list[int], shape: DraftShape, *, max_nodes: list[int] | None = None,
                max_depth: list[int] | None = None) -> Drafts:  # fmt: skip
        nodes = np.array(max_nodes or [shape.nodes] * len(rows), np.int32)
        depth = np.array(max_depth or [shape.steps] * len(rows), np.int32)
        index = np.array(rows, np.int32)
        starts = self.done[index]
        for row, start, count in zip(rows, starts.tolist(), nodes.tolist(), strict=True):
            self.own(row, start + count)
        allowed = {row: range(int(n) + 1, int(n) + max(int(t) - 1, 1))
                   for row, n, t in zip(rows, starts, nodes, strict=True)}  # fmt: skip
        with Watch(self, allowed):
            return self.proposer.propose(DraftRound(index, starts, nodes, depth, shape))

    def accept(self, row: int, drafts: Drafts, tree: int, count: int) -> int:
        """Follow up to ``count`` drafts; order the slots; returns how many are consumed."""
        first, last = drafts.cu_nodes[tree : tree + 2]
        tokens, parents = drafts.token_ids[first:last], drafts.parents[first:last]
        path, n = [0], int(self.done[row])
        while len(path) <= count:
            below = np.flatnonzero(parents == path[-1])
            if not len(below):
                break
            path.append(int(self.random.choice(below)))
        order = slot_order(np.array(path, np.int32), last - first)
        self.kv_slots[row, n : n + len(order)] = self.kv_slots[row, n + order]
        self.token_ids[row, n : n + len(path)] = tokens[path]
        self.hidden[row, n : n + len(path)] = self.draw_hidden(len(path))
        return len(path)


class Watch:
    """No slot changes but those at the given columns of each row, in the draft layer alone."""

    def __init__(self, world: World, allowed: dict[int, range]) -> None:
        self.world = world
        self.before = [pool.clone() for pool in (world.k, world.v)]
        self.slots = {
            int(world.kv_slots[row, column])
            for row, columns in allowed.items()
            for column in columns
            if column < world.owned[row]
        }

    def __enter__(self) -> None:
        return None

    def __exit__(self, *failure: object) -> None:
        layer = self.world.config.num_attention_layers
        for old, new in zip(self.before, (self.world.k, self.world.v), strict=True):
            changed = (old.nan_to_num(9e9) != new.nan_to_num(9e9)).flatten(2).any(2)
            assert not changed[:layer].any()
            assert set(changed[layer:].any(0).nonzero().flatten().tolist()) <= self.slots

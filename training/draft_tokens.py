"""The target's own continuations, with everything that the draft heads learn from.

Owns: the work list (prompts, limits, temperatures), sampling, when a document ends, and the store
of finished documents. Does not know: the model's arithmetic (`target_stream.py`), training.
A document is a prompt and the target's reply; with no room for a reply it is only read. All rows
go on at once: a row that has ended takes the next document, so no row waits for the longest one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from draft_model import Rows
from prepare_data import REPLY_BIT
from target_stream import TargetStream
from torch import Tensor

TURN_END_ID = 2
BURST = 16  # steps between two looks at which rows have ended


@dataclass(frozen=True)
class Mix:
    """How the work list is made from chats.

    Shares are of documents: read whole (`documents`), with other chats before them (`joined`),
    and, of those continued, greedily (`greedy`); the others get a temperature of 0.4 to 1.
    """

    max_prompt: int = 320
    max_new: int = 192
    documents: float = 0.08
    joined: float = 0.2
    greedy: float = 0.6


@dataclass(frozen=True)
class Work:
    """Prompts one after another, and per document: where its prompt is, and how to go on."""

    tokens: np.ndarray  # uint16[N], with `REPLY_BIT`
    begins: np.ndarray  # int64[D]
    sizes: np.ndarray  # int64[D], of the prompts
    limits: np.ndarray  # int64[D], of prompt and reply together
    temperatures: np.ndarray  # float32[D], 0 is greedy

    @classmethod
    def from_prompts(
        cls, prompts: list[np.ndarray], limits: list[int], temperatures: list[float]
    ) -> Work:
        """From separate arrays."""
        sizes = np.array([len(p) for p in prompts], np.int64)
        return cls(
            np.concatenate(prompts),
            np.cumsum(sizes) - sizes,
            sizes,
            np.array(limits, np.int64),
            np.array(temperatures, np.float32),
        )


def cut_prompt(chat: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray | None:
    """A chat up to one of its replies; a chat without any is a prompt. None if all are too long."""
    is_reply = chat >= REPLY_BIT
    if not is_reply.any():
        return chat if len(chat) <= most else None
    starts = np.flatnonzero(is_reply[1:] & ~is_reply[:-1]) + 1
    starts = starts[starts <= most]
    return chat[: rng.choice(starts)] if len(starts) else None


def make_work(chats: list[np.ndarray], order: np.ndarray, mix: Mix, seed: int) -> Work:
    """The work list for chats (without end-of-text) in the given order of indices."""
    rng = np.random.default_rng(seed)
    prompts, limits, temperatures = [], [], []
    for index in order:
        chat, most = chats[index], mix.max_prompt
        whole = bool(rng.random() < mix.documents) and bool((chat >= REPLY_BIT).any())
        prompt = chat[:most] if whole else cut_prompt(chat, most, rng)
        if prompt is None:
            continue
        if rng.random() < mix.joined:
            before = chats[rng.integers(len(chats))]
            if len(before) + len(prompt) <= most and (before >= REPLY_BIT).any():
                prompt = np.concatenate([before, prompt])
        prompts.append(prompt)
        limits.append(len(prompt) + (0 if whole else mix.max_new))
        temperatures.append(0.0 if rng.random() < mix.greedy else float(rng.uniform(0.4, 1.0)))
    return Work.from_prompts(prompts, limits, temperatures)


class TokenStore:
    """Finished documents end to end on one device, the outputs of the target beside each token.

    `is_goal[p]`: the token after p belongs to the same document and to a reply.
    """

    def __init__(self, stream: TargetStream, capacity: int, dtype: torch.dtype) -> None:
        s, device = stream.model.shape, stream.row_index.device
        self.capacity, self.count = capacity, 0
        kv = (capacity, s.num_kv_heads, s.head_dim)
        self.ids = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.position = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.is_goal = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(capacity, s.hidden, dtype=dtype, device=device)
        self.keys = torch.zeros(kv, dtype=dtype, device=device)
        self.values = torch.zeros(kv, dtype=dtype, device=device)
        self.sizes: list[int] = []  # of documents, in order
        self.numbers: list[int] = []  # their places in the work list

    def rows(self, index: Tensor) -> tuple[Rows, Tensor]:
        """Documents gathered by int64[R, T] places, and their `is_goal`; -1 is padding."""
        pad, at = index < 0, index.clamp_min(0)
        position = self.position[at].long().masked_fill(pad, 0)
        ids = self.ids[at].long().masked_fill(pad, 0)
        parts = (self.hidden[at], self.keys[at], self.values[at])
        return Rows(ids, position, *parts), self.is_goal[at] & ~pad


class Session:
    """Runs a work list through a stream into a store."""

    def __init__(self, stream: TargetStream, store: TokenStore, work: Work) -> None:
        self.stream, self.store, self.work = stream, store, work
        device, b = stream.row_index.device, stream.rows

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        self.tokens, self.begins = put(work.tokens), put(work.begins)
        self.sizes = put(work.sizes)
        self.limits = put(work.limits).clamp_max(stream.length)
        self.temperatures = torch.from_numpy(work.temperatures).to(device)
        self.number = torch.zeros(b, dtype=torch.int64, device=device)
        self.position = torch.zeros(b, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(b, dtype=torch.int64, device=device)
        self.done = torch.ones(b, dtype=torch.bool, device=device)
        self.idle = torch.ones(b, dtype=torch.bool, device=device)  # done, and nothing to store
        shape = (b, stream.length + 1)
        self.ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(
            (*shape, stream.model.shape.hidden), dtype=store.hidden.dtype, device=device
        )
        self.next = 0
        self._assign(self.done.nonzero()[:, 0])

    @torch.inference_mode()
    def run(self, deadline: float) -> None:
        """Goes on until the work is done, the store is full or the time (`time.time`) is up."""
        while not bool(self.idle.all()) and time.time() < deadline:
            for _ in range(BURST):
                self._step()
            ended = (self.done & ~self.idle).nonzero()[:, 0]
            if not self._harvest(ended):
                return
            self._assign(ended)

    def _step(self) -> None:
        number, b = self.number, self.stream.row_index
        size = self.sizes[number]
        in_prompt = self.position < size
        place = (self.begins[number] + self.position).clamp_max(len(self.tokens) - 1)
        token = torch.where(in_prompt, self.tokens[place] & (REPLY_BIT - 1), self.sampled)
        slot = torch.where(self.done, self.stream.length, self.position)
        hidden = self.stream.feed(token, slot)
        self.ids[b, slot] = token.int()
        self.hidden[b, slot] = hidden.to(self.hidden.dtype)
        self.sampled = sample(self.stream.logits(hidden), self.temperatures[number])
        ended = ~in_prompt & (token == TURN_END_ID)
        self.done = self.done | ended | (self.position + 1 >= self.limits[number])
        self.position = torch.where(self.done, self.position, self.position + 1)

    def _harvest(self, rows: Tensor) -> bool:
        """Copies ended rows into the store; False if they do not fit."""
        if not len(rows):
            return True
        store, number = self.store, self.number[rows]
        length = self.position[rows] + 1
        total, start = int(length.sum()), store.count
        if start + total > store.capacity:
            return False
        column = torch.arange(self.stream.length + 1, device=rows.device)
        kept = column < length[:, None]
        place = (self.begins[number][:, None] + column).clamp_max(len(self.tokens) - 1)
        in_reply = (column >= self.sizes[number][:, None]) | (self.tokens[place] >= REPLY_BIT)
        goal = in_reply.roll(-1, 1) & (column < length[:, None] - 1)
        last, cut = self.stream.full[-1], slice(start, start + total)
        store.ids[cut] = self.ids[rows][kept]
        store.position[cut] = column.expand_as(kept)[kept].int()
        store.is_goal[cut] = goal[kept]
        store.hidden[cut] = self.hidden[rows][kept]
        for name, cache in (("keys", self.stream.keys), ("values", self.stream.values)):
            found = cache[last][rows].transpose(1, 2)[kept]
            getattr(store, name)[cut] = found.to(store.keys.dtype)
        store.count += total
        store.sizes += length.tolist()
        store.numbers += number.tolist()
        return True

    def _assign(self, rows: Tensor) -> None:
        """Gives each of these rows the next document; rows left over stay idle."""
        count = min(len(rows), len(self.work.sizes) - self.next)
        fresh, rest = rows[:count], rows[count:]
        self.number[fresh] = torch.arange(self.next, self.next + count, device=rows.device)
        self.next += count
        self.position[fresh] = 0
        self.done[fresh] = self.idle[fresh] = False
        self.idle[rest] = True


def sample(logits: Tensor, temperature: Tensor) -> Tensor:
    """int64[B] from [B, V]: the best token where the temperature is 0, else a sampled one."""
    noise = -torch.empty_like(logits).exponential_().log()
    return torch.where(
        (temperature > 0)[:, None], logits + temperature[:, None] * noise, logits
    ).argmax(-1)


def load_chats(path: str, prefix: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The chats of a file of `prepare_drafts.py` whose names begin with `prefix`, and the order."""
    with np.load(path) as file:
        tokens, starts = file[f"{prefix}tokens"], file[f"{prefix}starts"]
        order = file[f"{prefix}order"] if f"{prefix}order" in file else np.arange(len(starts) - 1)
    return [tokens[a:z] for a, z in pairwise(starts)], order

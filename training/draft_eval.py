"""How well the draft heads foresee the target: agreement of each step, and tokens a round.

Owns: packing of stored documents into rows, the held-out replies (MT-bench, both turns, and
GSM8K), and the greedy rounds that serving would go through. Does not know: training.
A round drafts from the newest token, keeps the drafts that agree and adds the target's own next
token. Drafts that agree are the target's own tokens, so one pass over the finished reply says
exactly what serving would accept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from draft_model import DraftHead
from draft_tokens import Session, TokenStore, Work, load_chats
from model import Model, linear
from target_stream import TargetStream
from torch import Tensor

NUM_STEPS = 6
OPEN_ROWS = 8  # rows that are filled side by side


def pack(sizes: np.ndarray, length: int, order: np.ndarray) -> np.ndarray:
    """Documents end to end in a store -> int64[R, length] of places, -1 at padding.

    A document longer than a row is left out. Each goes into the first of a few open rows that has
    room; the fullest one makes place for a new row.
    """
    starts = np.cumsum(sizes) - sizes
    rows: list[list[int]] = []
    is_open: list[tuple[int, list[int]]] = []  # (room left, documents)
    for number in order:
        size = int(sizes[number])
        if size > length:
            continue
        for n, (room, documents) in enumerate(is_open):
            if size <= room:
                documents.append(number)
                is_open[n] = (room - size, documents)
                break
        else:
            if len(is_open) == OPEN_ROWS:
                rows.append(is_open.pop(min(range(OPEN_ROWS), key=lambda n: is_open[n][0]))[1])
            is_open.append((length - size, [number]))
    rows += [documents for _, documents in is_open]
    index = np.full((len(rows), length), -1, np.int64)
    for row, documents in zip(index, rows, strict=True):
        places = np.concatenate([np.arange(starts[d], starts[d] + sizes[d]) for d in documents])
        row[: len(places)] = places
    return index


@dataclass(frozen=True)
class Heldout:
    """Greedy replies to test prompts; `groups` says which documents belong to which set."""

    store: TokenStore
    groups: dict[str, range]


def make_heldout(model: Model, data: str, *, length: int, max_new: int, limit: int) -> Heldout:
    """Lets the target answer at most `limit` prompts of each test set; all in float32."""
    sets = {
        n: load_chats(data, n + "_")[0][:limit] for n in ("mt_bench", "mt_bench_second", "gsm8k")
    }
    rows = max(map(len, sets.values()))
    stream = TargetStream(model, rows, length, kv_dtype=torch.float32)
    store = TokenStore(stream, sum(map(len, sets.values())) * length, torch.float32)
    groups = {}

    def answer(name: str, prompts: list[np.ndarray]) -> None:
        begin = len(store.sizes)
        limits = [len(p) + max_new for p in prompts]
        session = Session(stream, store, Work.from_prompts(prompts, limits, [0.0] * len(prompts)))
        session.run(time.time() + 60.0)
        groups[name] = range(begin, len(store.sizes))

    answer("mt_bench", sets["mt_bench"])
    ids, starts = store.ids.cpu().numpy(), np.cumsum([0, *store.sizes])
    chats = {n: ids[a:z] for n, a, z in zip(store.numbers, starts[:-1], starts[1:], strict=True)}
    again = [np.concatenate([chats[n], sets["mt_bench_second"][n]]) for n in sorted(chats)]
    fitting = [p.astype(np.uint16) for p in again if len(p) < length - 32]
    answer("mt_bench_second", fitting)
    answer("gsm8k", sets["gsm8k"])
    return Heldout(store, groups)


@torch.inference_mode()
def right_steps(head: DraftHead, store: TokenStore, embed: Tensor, length: int) -> np.ndarray:
    """bool[N, NUM_STEPS]: whether step k, begun at each stored token, gives the token k later."""
    sizes = np.array(store.sizes)
    right = np.zeros((store.count, NUM_STEPS), bool)
    index = pack(sizes, length, np.argsort(-sizes, kind="stable"))
    for part in np.array_split(index, max(1, len(index) // 8)):
        at = torch.from_numpy(part).to(embed.device)
        rows, goal = store.rows(at)
        wanted = goal.flatten().roll(1, 0) & (rows.position.flatten() > 0)
        anchors = wanted.nonzero()[:, 0]
        places = at.flatten()[anchors].cpu().numpy()
        for k, out in enumerate(head.steps(rows, embed, NUM_STEPS)):
            best = linear(out[anchors].to(embed.dtype), embed).argmax(-1)
            right[places, k] = (best == rows.later(k + 1)[anchors]).cpu().numpy()
    return right


def count_rounds(right: np.ndarray, chain: int) -> int:
    """Rounds that a reply takes: bool[n, steps] for its tokens, the first of which is there.

    The last token needs no draft, so n tokens have n - 1 to go; `right[i, k]` is step k+1 begun
    at token i.
    """
    at, rounds, last = 0, 0, len(right) - 1
    while at < last:
        accepted = 0
        while accepted < min(chain, last - at) and right[at, accepted]:
            accepted += 1
        at += min(accepted + 1, last - at)
        rounds += 1
    return rounds


def measure(right: np.ndarray, held: Heldout) -> dict[str, dict]:
    """Per set: share of right tokens at each step, alone and given that all before were right."""
    goal = held.store.is_goal[: held.store.count].cpu().numpy()
    starts = np.cumsum([0, *held.store.sizes])
    result = {}
    for name, documents in held.groups.items():
        replies = []
        for d in documents:
            places = starts[d] + np.flatnonzero(goal[starts[d] : starts[d + 1]]) + 1
            if len(places) > 1:
                replies.append(right[places])
        counts = np.zeros((3, NUM_STEPS))  # tried, right, right with all before
        for reply in replies:
            together = np.logical_and.accumulate(reply, 1)
            for k in range(NUM_STEPS):
                inside = slice(0, max(0, len(reply) - 1 - k))
                counts[:, k] += (
                    len(reply[inside]),
                    reply[inside, k].sum(),
                    together[inside, k].sum(),
                )
        tokens = sum(len(r) - 1 for r in replies)
        rounds = {c: sum(count_rounds(r, c) for r in replies) for c in range(1, NUM_STEPS + 1)}
        tried = np.maximum(counts[0], 1)
        result[name] = {
            "replies": len(replies),
            "tokens": tokens,
            "agreement": [round(float(x), 4) for x in counts[1] / tried],
            "all_right_so_far": [round(float(x), 4) for x in counts[2] / tried],
            "tokens_per_round": {str(c): round(tokens / max(1, n), 3) for c, n in rounds.items()},
        }
    return result

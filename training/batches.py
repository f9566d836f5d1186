"""Token files to batches: documents packed into rows, sources in fixed shares of tokens.

Owns: packing, the mix, loss masks, held-out batches. Reads what `prepare_data.py` writes.
A batch is `(ids, position, targets)`, int32[R, T] each: `position` is a token's place in its
document, `targets` the next token of the same document or -100. Padding is single-token documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prepare_data import REPLY_BIT
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

MAX_TRIES = 6  # pieces tried to fill the end of a row
MIN_GAP = 24  # a gap smaller than this is padded at once


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Mix:
    """What batches are made of.

    `replies_only`: loss on assistant turns only. `joined_share`: share of rows that are one long
    document, made of chats (or texts) one after another, without resets between them.
    """

    weights: tuple[tuple[str, float], ...]
    rows: int
    length: int
    replies_only: bool = False
    joined_share: float = 0.0


def load_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens uint16[N] and document starts int64[D + 1]."""
    with np.load(path) as file:
        return file["tokens"], file["starts"]


def cut_pieces(starts: np.ndarray, length: int) -> np.ndarray:
    """Documents cut to at most `length` tokens: int64[P, 2] of begin and end."""
    sizes = np.diff(starts)
    counts = -(-sizes // length)
    begins = np.repeat(starts[:-1], counts)
    number = np.arange(len(begins)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = begins + number * length
    ends = np.minimum(begins + length, np.repeat(starts[1:], counts))
    return np.stack([begins, ends], 1)[ends - begins > 1]


class _Stream:
    """Pieces of one source in random order, for ever."""

    def __init__(self, tokens: np.ndarray, pieces: np.ndarray, rng: np.random.Generator) -> None:
        self.tokens, self.pieces, self.rng = tokens, pieces, rng
        self.order: np.ndarray = np.zeros(0, np.int64)
        self.next = 0

    def draw(self) -> np.ndarray:
        if self.next >= len(self.order):
            self.order, self.next = self.rng.permutation(len(self.pieces)), 0
        begin, end = self.pieces[self.order[self.next]]
        self.next += 1
        return self.tokens[begin:end]


class _Builder:
    """Rows of one batch under construction."""

    def __init__(self, mix: Mix) -> None:
        shape = (mix.rows, mix.length)
        self.mix = mix
        self.ids = np.zeros(shape, np.int32)
        self.position = np.zeros(shape, np.int32)
        self.targets = np.full(shape, -100, np.int32)

    def put(self, row: int, at: int, piece: np.ndarray, first_position: int = 0) -> None:
        """Writes a piece; its last token has no target unless the next piece joins on."""
        n = len(piece)
        ids = (piece & (REPLY_BIT - 1)).astype(np.int32)
        self.ids[row, at : at + n] = ids
        self.position[row, at : at + n] = np.arange(first_position, first_position + n)
        targets = ids
        if self.mix.replies_only:
            targets = np.where(piece >= REPLY_BIT, ids, -100)
        self.targets[row, at : at + n - 1] = targets[1:]
        if first_position:
            self.targets[row, at - 1] = targets[0]

    def arrays(self) -> Batch:
        return self.ids, self.position, self.targets


class PackedBatches(IterableDataset):
    """Endless batches of a mix; each loader worker draws with its own seed."""

    def __init__(self, data: Path, mix: Mix, seed: int) -> None:
        self.data, self.mix, self.seed = data, mix, seed

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        rng = np.random.default_rng([self.seed, info.id if info else 0])
        streams, weights = [], []
        for name, weight in self.mix.weights:
            path = self.data / f"{name}.train.npz"
            if weight > 0 and path.exists():
                tokens, starts = load_tokens(path)
                streams.append(_Stream(tokens, cut_pieces(starts, self.mix.length), rng))
                weights.append(weight)
        share = np.array(weights) / sum(weights)
        drawn = np.zeros(len(streams))

        def draw() -> np.ndarray:
            chosen = int(np.argmax(share * (drawn.sum() + 1000.0) - drawn + rng.random(len(share))))
            piece = streams[chosen].draw()
            drawn[chosen] += len(piece)
            return piece

        pending: list[np.ndarray] = []
        while True:
            batch = _Builder(self.mix)
            for row in range(self.mix.rows):
                if rng.random() < self.mix.joined_share:
                    self._fill_joined(batch, row, streams, share, rng)
                else:
                    self._fill(batch, row, draw, pending)
            yield batch.arrays()

    def _fill(self, batch: _Builder, row: int, draw, pending: list[np.ndarray]) -> None:
        """Whole pieces until the gap is small or nothing fits; what does not fit waits its turn."""
        at, tries, passed = 0, 0, []
        while self.mix.length - at >= MIN_GAP and tries < MAX_TRIES:
            piece = pending.pop(0) if pending else draw()
            if len(piece) <= self.mix.length - at:
                batch.put(row, at, piece)
                at += len(piece)
            else:
                passed.append(piece)
                tries += 1
        pending.extend(passed)

    def _fill_joined(
        self, batch: _Builder, row: int, streams: list[_Stream], share: np.ndarray, rng
    ) -> None:
        """One document: pieces of one source end to end, without end-of-text between them."""
        stream = streams[rng.choice(len(streams), p=share)]
        at = 0
        while self.mix.length - at >= 2:
            piece = stream.draw()[:-1][: self.mix.length - at]
            if len(piece) >= 2:
                batch.put(row, at, piece, first_position=at)
                at += len(piece)


def _as_is(batch: Batch) -> Batch:
    return batch


def make_loader(data: Path, mix: Mix, *, seed: int, workers: int) -> Iterator[Batch]:
    """Batches made ahead of time by worker processes.

    They stay NumPy arrays, which travel through pipes and need no shared memory.
    """
    dataset = PackedBatches(data, mix, seed)
    options = {"num_workers": workers, "prefetch_factor": 8} if workers else {}
    return iter(DataLoader(dataset, batch_size=None, collate_fn=_as_is, **options))


def heldout_batches(path: Path, *, rows: int, length: int, replies_only: bool) -> list[Batch]:
    """All held-out documents of one source, packed in order."""
    tokens, starts = load_tokens(path)
    mix = Mix((), rows, length, replies_only)
    batches, batch, row, at = [], _Builder(mix), 0, 0
    for begin, end in cut_pieces(starts, length):
        if end - begin > length - at:
            row, at = row + 1, 0
        if row == rows:
            batches.append(batch.arrays())
            batch, row = _Builder(mix), 0
        batch.put(row, at, tokens[begin:end])
        at += end - begin
    return [*batches, batch.arrays()]

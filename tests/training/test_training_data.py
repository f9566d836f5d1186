"""Texts to tokens to packed batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import prepare_data
import pytest
from batches import Mix, PackedBatches, cut_pieces, heldout_batches, load_tokens
from chat_format import render_parts
from prepare_data import REPLY_BIT, encode_documents, split_chunks, write
from tokenizers import Tokenizer

LENGTH, ROWS = 64, 4
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "2 plus 3 is 5.\n"},
    {"role": "user", "content": "naïve 日本語 🙂"},
    {"role": "assistant", "content": "Hello!"},
]


@pytest.fixture(scope="module")
def tokenizer(shipped: Path) -> Tokenizer:
    path = str(shipped / "tokenizer.json")
    prepare_data._start_worker(path)
    return Tokenizer.from_file(path)


def numbered(source: int, sizes: list[int], *, replies: bool = False) -> list[np.ndarray]:
    """Documents whose tokens tell source and place; the last third of each is a reply if asked."""
    documents, at = [], 0
    for size in sizes:
        tokens = np.arange(at, at + size, dtype=np.uint16) + source * 10_000
        if replies:
            tokens[-(size // 3) :] |= REPLY_BIT
        documents.append(tokens)
        at += size
    return documents


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sources: many short documents, and some that are longer than a row."""
    sizes = np.random.default_rng(0).integers(2, 50, 150).tolist()
    write(numbered(0, sizes, replies=True), tmp_path / "short.train.npz")
    write(numbered(1, [10, 200, 65, 64, 63, 129], replies=True), tmp_path / "long.train.npz")
    return tmp_path


def batches_of(data: Path, count: int, **options: object) -> list[tuple[np.ndarray, ...]]:
    weights = (("short", 0.75), ("long", 0.25), ("absent", 0.5))
    mix = Mix(weights, ROWS, LENGTH, **options)
    return list(islice(PackedBatches(data, mix, seed=1), count))


def documents_of(batch: tuple[np.ndarray, ...]) -> Iterator[tuple[np.ndarray, ...]]:
    """Each document of a batch as (ids, position, targets), padding left out."""
    for row in zip(*batch, strict=True):
        starts = np.flatnonzero(row[1] == 0)
        for begin, end in zip(starts, [*starts[1:], len(row[0])], strict=True):
            if end - begin > 1:
                yield tuple(a[begin:end] for a in row)


def test_a_chat_encodes_as_its_whole_text(tokenizer: Tokenizer):
    array = encode_documents([CHAT])[0]
    text = "".join(part for part, _ in render_parts(CHAT)) + "<|endoftext|>"
    assert array.dtype == np.uint16
    assert (array & (REPLY_BIT - 1)).tolist() == tokenizer.encode(text).ids


def test_replies_are_marked_with_their_ends_and_nothing_else(tokenizer: Tokenizer):
    array = encode_documents([CHAT])[0]
    marked = (array[array >= REPLY_BIT] & (REPLY_BIT - 1)).tolist()
    text = tokenizer.decode(marked, skip_special_tokens=False)
    assert text == "2 plus 3 is 5.\n<|im_end|>Hello!<|im_end|>"


def test_plain_texts_are_not_marked_and_keep_their_order(tokenizer: Tokenizer):
    texts = ["A first text.", "Another one"]
    decoded = [tokenizer.decode(a.tolist(), skip_special_tokens=False) for a in
               encode_documents(texts)]  # fmt: skip
    assert decoded == [t + "<|endoftext|>" for t in texts]


def test_chunks_keep_order_and_lose_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_data, "CHUNK_CHARS", 50)
    documents = ["x" * n for n in range(1, 30)] + [CHAT]
    chunks = split_chunks(documents)
    assert [d for chunk in chunks for d in chunk] == documents
    assert len(chunks) > 5


def test_written_files_come_back(tmp_path: Path):
    arrays = numbered(0, [3, 1, 7])
    assert write(arrays, tmp_path / "x.npz") == 11
    tokens, starts = load_tokens(tmp_path / "x.npz")
    assert tokens.tolist() == list(range(11))
    assert starts.tolist() == [0, 3, 4, 11]


def test_pieces_stay_inside_documents():
    sizes = np.array([10, 1, 200, 65, 64, 2])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    pieces = cut_pieces(starts, LENGTH).tolist()
    covered = [t for begin, end in pieces for t in range(begin, end)]
    assert len(covered) == len(set(covered))
    # Lost are only pieces of one token, which have nothing to predict.
    assert sorted(set(range(starts[-1])) - set(covered)) == [10, starts[3] + 64]
    for begin, end in pieces:
        document = np.searchsorted(starts, begin, side="right") - 1
        assert 2 <= end - begin <= LENGTH
        assert end <= starts[document + 1]


@pytest.mark.parametrize("replies_only", [False, True])
def test_packed_rows(data: Path, replies_only: bool):
    known = {}
    for name in ("short", "long"):
        tokens, starts = load_tokens(data / f"{name}.train.npz")
        for begin, end in cut_pieces(starts, LENGTH):
            known[int(tokens[begin] & (REPLY_BIT - 1))] = tokens[begin:end]
    fill = 0
    for batch in batches_of(data, 6, replies_only=replies_only):
        assert all(a.shape == (ROWS, LENGTH) and a.dtype == np.int32 for a in batch)
        for ids, position, targets in documents_of(batch):
            piece = known[int(ids[0])]
            assert ids.tolist() == (piece & (REPLY_BIT - 1)).tolist()
            assert position.tolist() == list(range(len(ids)))
            trained = (piece[1:] >= REPLY_BIT) | (not replies_only)
            assert targets.tolist() == [*np.where(trained, ids[1:], -100).tolist(), -100]
            fill += len(ids)
    assert fill > 0.7 * 6 * ROWS * LENGTH  # pieces are long for these short rows


def test_joined_rows_are_one_document(data: Path):
    for ids, position, targets in batches_of(data, 3, joined_share=1.0):
        for row in range(ROWS):
            length = LENGTH if position[row, -1] else LENGTH - 1  # one place may be left over
            assert position[row, :length].tolist() == list(range(length))
            assert targets[row, : length - 1].tolist() == ids[row, 1:length].tolist()
            assert (targets[row, length - 1 :] == -100).all()


def test_sources_get_their_shares(data: Path):
    counts = np.zeros(2)
    for batch in batches_of(data, 150):
        for ids, _, _ in documents_of(batch):
            counts[int(ids[0]) // 10_000] += len(ids)
    assert counts[0] / counts.sum() == pytest.approx(0.75, abs=0.03)


def test_heldout_batches_hold_every_piece_once_and_in_order(data: Path):
    tokens, starts = load_tokens(data / "short.train.npz")
    found = [
        ids
        for batch in heldout_batches(
            data / "short.train.npz", rows=ROWS, length=LENGTH, replies_only=False
        )
        for ids, _, _ in documents_of(batch)
    ]
    assert len(found) == len(starts) - 1
    assert np.concatenate(found).tolist() == (tokens & (REPLY_BIT - 1)).tolist()

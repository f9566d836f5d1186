"""Turns the texts into token files: one per source, held-out documents apart.

    python training/prepare_data.py --corpus CORPUS --tokenizer DIR --out DATA \
        --teacher teacher_*.jsonl.gz --exclude mt_bench_question.jsonl.gz gsm8k_test.jsonl.gz

Writes, for each source, `NAME.train.npz` and `NAME.heldout.npz`: `tokens` (uint16, bit 15 set where
the token belongs to an assistant's reply, its `<|im_end|>` included) and `starts` (int64, one more
than there are documents). Every document ends with `<|endoftext|>`. Runs on all cores; about half a
minute on 16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
from chat_format import END_OF_TEXT, render_parts
from corpus import SOURCES, Document, load_exclusions, load_source
from tokenizers import Tokenizer

REPLY_BIT = 1 << 15
HELDOUT_SHARE, HELDOUT_MAX_TOKENS = 0.01, 60_000
CHUNK_CHARS = 2_000_000

_tokenizer: Tokenizer  # one per worker process, set by its initializer


def _start_worker(path: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(path)


def encode_documents(documents: list[Document]) -> list[np.ndarray]:
    """Token arrays of documents, replies marked by `REPLY_BIT`."""
    end = _tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[str] = []
    spans: list[list[tuple[int, bool]]] = []  # per document: (index into pieces, is_reply)
    for document in documents:
        parts = [(document, False)] if isinstance(document, str) else render_parts(document)
        spans.append([(len(pieces) + i, is_reply) for i, (_, is_reply) in enumerate(parts)])
        pieces += [text for text, _ in parts]
    # A chat is encoded piece by piece. The marks around a turn are special tokens, and contents do
    # not begin with white space (`clean_chat`), so this gives the same ids as encoding the whole.
    encodings = _tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    arrays = []
    for span in spans:
        ids: list[int] = []
        for i, is_reply in span:
            found = encodings[i].ids
            ids += [t | REPLY_BIT for t in found] if is_reply else found
        arrays.append(np.array([*ids, end], dtype=np.uint16))
    return arrays


def split_chunks(documents: list[Document]) -> list[list[Document]]:
    """Groups documents into chunks of about `CHUNK_CHARS` for the worker processes."""
    chunks: list[list[Document]] = [[]]
    size = 0
    for document in documents:
        chunks[-1].append(document)
        size += (
            len(document) if isinstance(document, str) else sum(len(m["content"]) for m in document)
        )
        if size > CHUNK_CHARS:
            chunks.append([])
            size = 0
    return [c for c in chunks if c]


def write(arrays: list[np.ndarray], path: Path) -> int:
    """Writes one token file; returns its number of tokens."""
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)
    starts = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
    np.savez(path, tokens=tokens, starts=starts)
    return len(tokens)


def main() -> None:
    """Reads, encodes and writes source after source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder of train_tokenizer.py"
    )
    parser.add_argument("--teacher", type=Path, nargs="*", default=[])
    parser.add_argument(
        "--exclude", type=Path, nargs="*", default=[], help="test prompts (JSON lines)"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--limit", type=int, default=0, help="documents per source, for a dry run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    excluded = load_exclusions(args.exclude)
    jobs = [(s, args.corpus, args.teacher, excluded, 0) for s in SOURCES]
    meta = {}
    with multiprocessing.Pool(
        args.processes,
        initializer=_start_worker,
        initargs=(str(args.tokenizer / "tokenizer.json"),),
    ) as pool:
        loads = [pool.apply_async(load_source, job) for job in jobs]
        for source, load in zip(SOURCES, loads, strict=True):
            documents = load.get()
            documents = documents[: args.limit] if args.limit else documents
            if not documents:
                continue
            results = pool.imap(encode_documents, split_chunks(documents))
            arrays = [a for chunk in results for a in chunk]
            num_tokens = sum(map(len, arrays))
            room, cut = min(HELDOUT_MAX_TOKENS, num_tokens * HELDOUT_SHARE), 0
            while room > 0 and cut < len(arrays) - 1:
                room -= len(arrays[cut])
                cut += 1
            if source.name == "handmade":  # its texts repeat by intent, so none of them is held out
                cut = 0
            heldout = write(arrays[:cut], args.out / f"{source.name}.heldout.npz")
            train = write(arrays[cut:], args.out / f"{source.name}.train.npz")
            meta[source.name] = {
                "documents": len(arrays),
                "tokens": train,
                "heldout_tokens": heldout,
            }
            print(f"data: {source.name}: {meta[source.name]}, {time.time() - begin:.1f} s")
    (args.out / "meta.json").write_text(json.dumps(meta, indent=1))
    print(
        f"data: {sum(m['tokens'] for m in meta.values()) / 1e6:.1f} M tokens "
        f"in {time.time() - begin:.1f} s"
    )


if __name__ == "__main__":
    main()

"""Writes the chats and prompts from which the draft heads learn, as one small file of tokens.

    python training/prepare_drafts.py --corpus CORPUS --teacher TEACHER/*.gz --tests TESTS \
        --tokenizer src/hyradix/demo_model --out DRAFTS.npz

Owns: how much of each source is used, and made-up questions about passages of the books. `TESTS`
holds `mt_bench_question.jsonl.gz` and `gsm8k_test.jsonl.gz`: their prompts are kept for measuring,
and chats that share eight words in a row with one are left out of the rest.
The arrays: `tokens` (uint16, `REPLY_BIT` as in `prepare_data.py`), `starts`, `order` (indices of
documents, a document several times if its source is small); `mt_bench_*`, `mt_bench_second_*` (the
later turn alone) and `gsm8k_*`. About a minute.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

import numpy as np
import prepare_data
from chat_format import TURN_END, TURN_START
from corpus import SOURCES, Document, load_exclusions, load_source
from prepare_data import encode_documents

# source -> (most tokens, times in the work list)
AMOUNTS: dict[str, tuple[int, int]] = {
    "sgd": (900_000, 3),
    "wordnet": (500_000, 1),
    "wordnet-rare": (250_000, 1),
    "persona": (700_000, 3),
    "tldr": (400_000, 1),
    "gsm8k": (1_400_000, 3),
    "mschitchat": (100_000, 1),
    "taskmaster4": (250_000, 1),
    "instruct": (130_000, 6),
    "teacher": (6_000_000, 1),
    "handmade": (300_000, 1),
}
PASSAGES, PASSAGE_COPIES = 12_000, 2
QUESTIONS = (
    "Summarize this text: {}",
    "Explain this text in simple words: {}",
    "{}\n\nWhat is this text about?",
    "Rewrite the following paragraph in your own words. {}",
    "{} Can you tell me more about this?",
    "Read this and answer: is it true? {}",
    "Write a short story that begins like this: {}",
    "Extract the names and numbers from this text: {}",
    "What would you say to a friend who told you this? {}",
    "Give me three questions about this paragraph: {}",
    "{}",
    "Write an email about this. {}",
)
OPENING = f"{TURN_START}assistant\n"


def passages(texts: list[Document], count: int, rng: random.Random) -> list[str]:
    """Prompts as text: a question of our own around some sentences of a book."""
    found = []
    while texts and len(found) < count:
        text = str(rng.choice(texts))
        size = int(rng.choice([120, 200, 300, 500, 700]))
        begin = text.find(". ", rng.randrange(max(1, len(text) - size))) + 2
        piece = " ".join(text[begin : begin + size].rsplit(". ", 1)[0].split())
        if len(piece) > 40 and piece.isascii():
            question = rng.choice(QUESTIONS).format(piece + ".")
            found.append(f"{TURN_START}user\n{question}{TURN_END}\n{OPENING}")
    return found


def prompt_arrays(texts: list[str]) -> list[np.ndarray]:
    """Token arrays of rendered prompts."""
    return [a[:-1] for a in encode_documents(list(texts))]


def read_tests(folder: Path) -> dict[str, list[str]]:
    """Rendered prompts of the test sets, by the names of their arrays."""

    def rows(name: str) -> list[dict]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def turn(text: str) -> str:
        return f"{TURN_START}user\n{text}{TURN_END}\n{OPENING}"

    chats = [row["turns"] for row in rows("mt_bench_question.jsonl.gz")]
    return {
        "mt_bench": [turn(first) for first, _ in chats],
        "mt_bench_second": ["\n" + turn(second) for _, second in chats],
        "gsm8k": [turn(row["question"]) for row in rows("gsm8k_test.jsonl.gz")[:200]],
    }


def packed(arrays: list[np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """Arrays end to end with their starts."""
    starts = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
    return {f"{prefix}tokens": np.concatenate(arrays), f"{prefix}starts": starts}


def take(documents: list[Document], most: int) -> list[np.ndarray]:
    """Encoded chats, without end-of-text, up to a number of tokens."""
    arrays, total = [], 0
    for chunk in prepare_data.split_chunks(documents):
        for array in encode_documents(chunk):
            if total >= most:
                return arrays
            arrays.append(array[:-1])
            total += len(array) - 1
    return arrays


def main() -> None:
    """Reads, encodes, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, nargs="*", default=[])
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the shipped folder")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(0)
    prepare_data._start_worker(str(args.tokenizer / "tokenizer.json"))
    excluded = load_exclusions(
        [args.tests / f for f in ("mt_bench_question.jsonl.gz", "gsm8k_test.jsonl.gz")]
    )
    arrays: list[np.ndarray] = []
    order: list[int] = []

    def add(name: str, found: list[np.ndarray], copies: int) -> None:
        print(f"drafts: {name}: {len(found)} documents, {sum(map(len, found))} tokens")
        order.extend(list(range(len(arrays), len(arrays) + len(found))) * copies)
        arrays.extend(found)

    for source in SOURCES:
        if source.name in AMOUNTS:
            most, copies = AMOUNTS[source.name]
            documents = load_source(source, args.corpus, args.teacher, excluded, 0)
            add(source.name, take(documents, most), copies)
        elif source.name in ("openstax", "standardebooks"):
            texts = load_source(source, args.corpus, [], set(), 0)
            found = prompt_arrays(passages(texts, PASSAGES // 2, rng))
            add(f"passages of {source.name}", found, PASSAGE_COPIES)
    np.random.default_rng(0).shuffle(order)
    result = packed(arrays) | {"order": np.array(order, np.int64)}
    for name, texts in read_tests(args.tests).items():
        result |= packed(prompt_arrays(texts), f"{name}_")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **result)
    print(f"drafts: {len(order)} entries, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""Prompts for oracles and benchmarks of drafts: chats of MT-bench and GSM8K, pieces of text.

Owns: reading them from the traces and texts of a data folder, and the waves they are served in.
Does not know: engines.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
NUM_MT_BENCH, NUM_GSM8K, NUM_CORPUS = 80, 100, 20
CORPUS_CHARACTERS = 1500


@dataclass(frozen=True)
class Conversation:
    """``turns``: what the user says, one after the other. ``text``: a piece to go on with."""

    name: str
    source: str
    turns: tuple[str, ...] = ()
    text: str = ""


def load_conversations(corpus: Path | None = None) -> list[Conversation]:
    """80 conversations of MT-bench (two turns), 100 questions of GSM8K, 20 pieces of the corpus.

    corpus: a folder of ``text_*.txt.gz``; without one the pieces are left out.
    """
    found = []
    for entry in _lines(DATA / "mt_bench_question.jsonl.gz")[:NUM_MT_BENCH]:
        name = f"mt-{entry['question_id']}"
        found.append(Conversation(name, "mt_bench", tuple(entry["turns"])))
    for i, entry in enumerate(_lines(DATA / "gsm8k_test.jsonl.gz")[:NUM_GSM8K]):
        found.append(Conversation(f"gsm-{i}", "gsm8k", (entry["question"],)))
    texts = sorted(corpus.glob("text_*.txt.gz")) if corpus is not None else []
    for i in range(NUM_CORPUS if texts else 0):
        with gzip.open(texts[i % len(texts)], "rt", encoding="utf-8") as file:
            file.read(20_000 * (1 + i // len(texts)))
            piece = file.read(CORPUS_CHARACTERS)
        found.append(Conversation(f"corpus-{i}", "corpus", text=piece))
    return found


def _lines(path: Path) -> list[dict[str, list[str]]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]

"""Reads the texts: which file is which source, what is dropped, how much of it is used.

Owns: the list of sources with their weights in both stages, and their cleaning rules.
Does not know: tokens. A document is either a `str` or a chat (list of messages).
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import handmade

Document = str | list[dict[str, str]]


@dataclass(frozen=True)
class Source:
    """One source. Weights are shares of tokens, made to add up to one over the sources present."""

    name: str
    files: tuple[str, ...]
    pretrain_weight: float
    chat_weight: float
    long_weight: float = 0.0


SOURCES = (
    Source("openstax", ("text_openstax_ccby.txt.gz",), 0.16, 0.0, 0.30),
    Source("standardebooks", ("text_standardebooks_cc0.txt.gz",), 0.05, 0.0, 0.20),
    Source("pythondocs", ("text_pythondocs_psf.txt.gz",), 0.02, 0.0, 0.10),
    Source("sgd", ("chat_sgd.jsonl.gz",), 0.10, 0.04, 0.05),
    Source("wordnet", ("chat_wordnet_qa.jsonl.gz",), 0.05, 0.06),
    Source("wordnet-rare", ("chat_wordnet_qa.jsonl.gz",), 0.04, 0.0),
    Source("persona", ("chat_persona.jsonl.gz",), 0.03, 0.05, 0.05),
    Source("tldr", ("chat_tldr.jsonl.gz",), 0.03, 0.02),
    Source("gsm8k", ("chat_gsm8k_train.jsonl.gz",), 0.03, 0.04),
    Source("mschitchat", ("chat_mschitchat.jsonl.gz",), 0.01, 0.01),
    Source("taskmaster4", ("chat_taskmaster4.jsonl.gz",), 0.01, 0.01),
    Source(
        "instruct",
        (
            "chat_rasbt_instruct.jsonl.gz",
            "chat_selfinstruct_seed.jsonl.gz",
            "chat_oasst_en100.jsonl.gz",
        ),
        0.01,
        0.04,
    ),
    Source("teacher", (), 0.44, 0.58, 0.25),
    Source("handmade", (), 0.03, 0.15, 0.05),
)
NUM_HANDMADE = 30_000
CHITCHAT_TONE = "friendly"
BOILERPLATE = re.compile(r"\[user|\[assistant|as an ai", re.IGNORECASE)


def clean_chat(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The chat without a trailing user turn, in plain message dicts; None if it is unusable."""
    chat = [{"role": m["role"], "content": m["content"].strip()} for m in messages]
    while chat and chat[-1]["role"] != "assistant":
        chat.pop()
    if not chat or any(not m["content"] or BOILERPLATE.search(m["content"]) for m in chat):
        return None
    return chat


def is_wanted(source: str, row: dict) -> bool:
    """Source-specific choice of rows."""
    if source == "wordnet":
        return row["freq"] > 0
    if source == "wordnet-rare":
        return row["freq"] == 0
    if source == "mschitchat":
        return row["src"].endswith(CHITCHAT_TONE)
    return True


def read_lines(path: Path) -> Iterator[dict]:
    """The JSON rows of a gzip file; a cut file (a run that was stopped) gives what it holds."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (EOFError, json.JSONDecodeError) as error:
        print(f"corpus: {path.name} ends early: {error}")


def add_system_turns(chats: list[Document], share: float, rng: random.Random) -> None:
    """Puts one of a few general system turns before a share of the chats, in place."""
    for i, chat in enumerate(chats):
        if isinstance(chat, list) and chat[0]["role"] == "user" and rng.random() < share:
            chats[i] = [{"role": "system", "content": rng.choice(handmade.SYSTEMS)}, *chat]


def ngrams(text: str, n: int = 8) -> set[tuple[str, ...]]:
    """The word n-grams of a text, lower case, without punctuation; a shorter text is one n-gram."""
    tokens = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(tokens[i : i + n]) for i in range(max(1, len(tokens) - n + 1))}


def load_exclusions(paths: list[Path]) -> set[tuple[str, ...]]:
    """Word n-grams of test sets' prompts (JSON lines with `turns`, `question` or `prompt`)."""
    found: set[tuple[str, ...]] = set()
    for path in paths:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                for text in row.get("turns") or [row.get("question") or row.get("prompt")]:
                    found |= {g for g in ngrams(text) if len(g) >= 6}
    return found


def load_source(
    source: Source, corpus: Path, teacher: list[Path], excluded: set[tuple[str, ...]], seed: int
) -> list[Document]:
    """All documents of one source, shuffled."""
    rng = random.Random(f"{source.name}-{seed}")
    documents: list[Document] = []
    num_dropped = 0
    if source.name == "handmade":
        documents += handmade.make_chats(NUM_HANDMADE, seed)
    paths = teacher if source.name == "teacher" else [corpus / name for name in source.files]
    for path in paths:
        if not path.exists():
            print(f"corpus: {path} is missing, going on without it")
        elif path.name.startswith("text_"):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                documents += [
                    t.strip() for t in file.read().split("<|doc|>") if len(t.strip()) > 40
                ]
        else:
            for row in read_lines(path):
                chat = clean_chat(row["messages"]) if is_wanted(source.name, row) else None
                if chat and excluded and source.name in ("teacher", "instruct"):
                    grams = set().union(
                        *(ngrams(m["content"]) for m in chat if m["role"] == "user")
                    )
                    if grams & excluded:
                        num_dropped += 1
                        continue
                if chat:
                    documents.append(chat)
    if num_dropped:
        print(
            f"corpus: {source.name}: {num_dropped} chats dropped, their questions are in a test set"
        )
    rng.shuffle(documents)
    add_system_turns(documents, 0.08, rng)
    return documents

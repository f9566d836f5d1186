"""A small ``tiktoken.model`` and what stands beside it in Kimi's model directories."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tests.text.conftest import CHATML, CORPUS

NUM_MERGES = 150
NUM_RANKS = 256 + NUM_MERGES
NAMED = {
    NUM_RANKS: {"content": "[BOS]", "special": True},
    NUM_RANKS + 1: {"content": "[EOS]", "special": True},
    NUM_RANKS + 2: {"content": "<|im_end|>", "special": True},
    NUM_RANKS + 5: {"content": "<|im_start|>", "special": True},
    NUM_RANKS + 6: {"content": "<think>", "special": False},
}


def learned_ranks() -> dict[bytes, int]:
    """Byte-pair merges of the corpus, the most frequent pair first."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in " ".join(CORPUS * 2).split(" ")]
    while len(ranks) < NUM_RANKS:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return ranks


def write_directory(path: Path, ranks: dict[bytes, int], **changes) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (path / "tiktoken.model").write_text("".join(lines))
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(i): token for i, token in NAMED.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": CHATML,
        **changes,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "tokenization_kimi.py").write_text("raise SystemExit('a checkpoint must not run code')")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": NUM_RANKS + 2}))
    return path

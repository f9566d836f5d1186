"""``tiktoken.model`` files: byte strings with their ranks, as Kimi's models ship them.

Owns: reading the file, the reserved tokens behind it, and the facts that only the tokenization
code of a checkpoint states (that code is never run): how text is split before merging.
Does not know: caches, chats.

Invariants:
- ids equal those of the ``tiktoken`` library for the same ranks, pattern and tokens.
- Nothing a user sends makes the library give up: very long texts and runs are cut first, by the
  rule of Kimi's own code (here between two control tokens, there in the whole text).
Read next: ``backend.py``.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyradix.errors import ModelLoadError
from hyradix.request import Int32Array
from hyradix.text.backend import ControlToken, lone_surrogate
from hyradix.text.model_files import read_json

FILE = "tiktoken.model"
NUM_RESERVED = 256
"""Ids behind the ranks that are control tokens, named in ``added_tokens_decoder`` or not."""
_PART_CHARS = 400_000
_RUN_CHARS = 25_000
"""A text is encoded in parts of so many characters, and a run of spaces, or of anything but
spaces, in stretches of so many."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        _BEFORE_WORD + _UPPER + "*" + _LOWER + "+" + _ENDING,
        _BEFORE_WORD + _UPPER + "+" + _LOWER + "*" + _ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
PATTERNS = {"TikTokenTokenizer": _KIMI}
"""How text is split, by the ``tokenizer_class`` of tokenizer_config.json."""


class TiktokenBackend:
    """See ``backend.Backend``."""

    is_byte_level = True
    adds_tokens = False

    def __init__(
        self, ranks: dict[bytes, int], control_tokens: Sequence[ControlToken], split: str
    ) -> None:
        self.control_tokens = tuple(control_tokens)
        special = {token.text: token.id for token in control_tokens}
        texts = sorted(special, key=len, reverse=True)
        self.pattern: re.Pattern[str] | None = re.compile("|".join(map(re.escape, texts)))
        self._encoding = _library().Encoding(
            "model", pat_str=split, mergeable_ranks=ranks, special_tokens=special
        )
        self._ids = special
        self._special_ids = frozenset(t.id for t in control_tokens if t.is_special)
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {token.id: token.text.encode() for token in control_tokens}
        self.vocab_size = max(self._bytes) + 1
        self.longest_token = max(map(len, self._bytes.values()))

    @classmethod
    def from_dir(cls, directory: Path) -> TiktokenBackend:
        """Load from a model directory. Raises ``ModelLoadError``."""
        config = read_json(directory / "tokenizer_config.json")
        name = config.get("tokenizer_class")
        if name not in PATTERNS:
            raise ModelLoadError(
                f"{directory / FILE} does not say how text is split, which is known for "
                f"tokenizer_class {', '.join(PATTERNS)} only, not for {name!r}"
            )
        ranks = read_ranks(directory / FILE)
        return cls(ranks, _control_tokens(config, len(ranks)), PATTERNS[name])

    def encode(self, text: str, *, adds_tokens: bool = False, literal: bool = False) -> Int32Array:
        """See ``Backend``; nothing is ever added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise lone_surrogate() from error
        allowed: Any = set() if literal else "all"
        ids: list[int] = []
        for part in _parts(text):
            ids += self._encoding.encode(part, allowed_special=allowed, disallowed_special=())
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See ``Backend``."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        joined = b"".join([self._bytes.get(i, b"") for i in ids if i not in skipped])
        return joined.decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """See ``Backend``; control tokens only."""
        return self._ids.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Backend``."""
        return self._bytes.get(token_id, b"")


def read_ranks(file: Path) -> dict[bytes, int]:
    """Lines of a base64 byte string and its rank. Raises ``ModelLoadError``."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().split(b"\n"):
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelLoadError(f"{file} has a token twice, or leaves out ranks")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelLoadError(f"{file} has no token for byte {missing[0]}")
    return ranks


def _control_tokens(config: dict[str, Any], num_ranks: int) -> list[ControlToken]:
    """Those that the config names, and placeholders for the rest of the reserved ids."""
    reserved = range(num_ranks, num_ranks + NUM_RESERVED)
    tokens = {i: ControlToken(i, f"<|reserved_token_{i}|>", True) for i in reserved}
    try:
        for key, entry in (config.get("added_tokens_decoder") or {}).items():
            token = ControlToken(int(key), entry["content"], bool(entry.get("special", True)))
            tokens[token.id] = token
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            "tokenizer_config.json: added_tokens_decoder must map ids to tokens with a content"
        ) from error
    if not all(isinstance(token.text, str) and token.text for token in tokens.values()):
        raise ModelLoadError("tokenizer_config.json: added_tokens_decoder has a token without text")
    return list(tokens.values())


def _parts(text: str) -> Iterator[str]:
    """Cuts of ``text``; mostly the whole."""
    for first in range(0, len(text), _PART_CHARS):
        part = text[first : first + _PART_CHARS]
        begin = 0
        if len(part) > _RUN_CHARS:
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + _RUN_CHARS, run.end(), _RUN_CHARS):
                    yield part[begin:cut]
                    begin = cut
        yield part[begin:]


def _library() -> Any:
    """Loaded late: few models need it, and it is the only place that does."""
    try:
        return importlib.import_module("tiktoken")
    except ImportError as error:
        raise ModelLoadError(f"{FILE} needs the tiktoken package: {error}") from error

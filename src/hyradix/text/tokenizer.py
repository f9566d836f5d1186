"""Text to token ids and back, over the library that knows the vocabulary.

Owns: the backend, end-of-sequence and special ids, the piece cache.
Does not know: chats, requests, streams (``detokenizer.py`` decodes incrementally).
Invariants: ids equal the library's for the same text; thread-safe.

Control tokens in text: ``encode`` parses them, as users of other engines expect of a raw prompt.
``encode_pieces`` can treat marked text literally; ``chat_template.py`` uses it so that the text
of a message cannot produce control tokens.
Read next: ``backend.py``, ``pieces.py``, ``chat_template.py``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from hyradix.errors import ModelLoadError
from hyradix.request import Int32Array
from hyradix.text import tiktoken_backend
from hyradix.text.backend import Backend, LibraryBackend
from hyradix.text.model_files import declared_eos_ids, special_tokens
from hyradix.text.pieces import PieceCache
from hyradix.text.tiktoken_backend import TiktokenBackend

_CACHE_CHARS = 1 << 23


@dataclass(frozen=True, slots=True)
class PieceEncoding:
    """A text tokenised, and where its pieces end.

    Piece i is text[char_ends[i-1]:char_ends[i]] and ids[token_ends[i-1]:token_ends[i]].
    """

    text: str
    ids: Int32Array
    char_ends: list[int]
    token_ends: list[int]


class Tokenizer:
    """A tokenizer of one model. backend: an object of the ``tokenizers`` library will do."""

    def __init__(
        self,
        backend: Backend | tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        if isinstance(backend, tokenizers.Tokenizer):
            backend = LibraryBackend(backend)
        self._backend: Backend = backend
        self._lock = threading.Lock()
        self._pattern = backend.pattern
        self._cache = PieceCache(_CACHE_CHARS)
        self.bytes_of = TokenBytes(backend)
        """What each token stands for; empty when the id has no text."""
        added = backend.control_tokens
        self._control_ids = {t.text: np.array([t.id], np.int32) for t in added}
        self.special_tokens = dict(special_tokens or {})
        """Named special tokens, for templates."""
        self.special_ids = frozenset(t.id for t in added if t.is_special)
        named = backend.token_id(self.special_tokens.get("eos_token", ""))
        eos = [*eos_token_ids, *([] if named is None else [named])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        self.is_byte_level = backend.is_byte_level
        self.vocab_size: int = backend.vocab_size
        """Tokens that have a text; a model's logits may be padded beyond it."""
        self.longest_token: int = backend.longest_token
        """Characters that one token can stand for at most (before normalisation)."""

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory: ``tokenizer.json``, else ``tiktoken.model``.

        Raises ``ModelLoadError``.
        """
        directory = Path(path)
        return cls(
            _find_backend(directory),
            eos_token_ids=declared_eos_ids(directory),
            special_tokens=special_tokens(directory),
        )

    @property
    def has_pieces(self) -> bool:
        """Whether texts are tokenised piece by piece (and literal marks are honoured)."""
        return self._pattern is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        """Token ids of ``text``, ``int32[T]``; control tokens in it are parsed.

        Args:
            add_special_tokens: add what the tokenizer puts around a text (a BOS, say). Rendered
                chat templates bring their own.

        Raises:
            InvalidParameterError: the text is not valid Unicode (a lone surrogate).
        """
        if not add_special_tokens or not self._backend.adds_tokens:
            return self.encode_pieces(text).ids
        with self._lock:
            return self._backend.encode(text, adds_tokens=True)

    def encode_pieces(self, text: str, *, literal_mark: str = "") -> PieceEncoding:
        """Tokenise without adding special tokens, keeping where the pieces end.

        Args:
            literal_mark: a character to be left out of the ids. Where it stands inside the text
                of a control token, that text is not parsed as one. ``char_ends`` count it.

        Cost: a look-up for each piece that was seen before.
        """
        if self._pattern is None:
            plain = text.replace(literal_mark, "") if literal_mark else text
            with self._lock:
                ids = self._backend.encode(plain)
            return PieceEncoding(text, ids, [len(text)], [len(ids)])
        parts: list[Int32Array] = []
        char_ends: list[int] = []
        start = 0
        with self._lock:
            for match in self._pattern.finditer(text):
                if match.start() > start:
                    parts.append(self._piece_ids(text[start : match.start()], literal_mark))
                    char_ends.append(match.start())
                parts.append(self._control_ids[match.group()])
                start = match.end()
                char_ends.append(start)
            if start < len(text):
                parts.append(self._piece_ids(text[start:], literal_mark))
                char_ends.append(len(text))
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return PieceEncoding(text, ids, char_ends, np.cumsum([len(p) for p in parts]).tolist())

    def num_prefix_tokens(
        self, whole: PieceEncoding, cut: int, *, literal_mark: str = ""
    ) -> int | None:
        """Tokens of ``whole.text[:cut]``, if its ids are a prefix of the whole's ids, else None.

        Cost: tokenises at most the one piece that the cut goes through.
        """
        i = bisect_left(whole.char_ends, cut)
        if cut > 0 and whole.char_ends[i] == cut:
            return whole.token_ends[i]
        start = whole.char_ends[i - 1] if i else 0
        before = whole.token_ends[i - 1] if i else 0
        # Also finds a shorter control token where the cut goes through a longer one.
        ids = self.encode_pieces(whole.text[start:cut], literal_mark=literal_mark).ids
        is_prefix = np.array_equal(ids, whole.ids[before : before + len(ids)])
        return before + len(ids) if is_prefix else None

    def mark_control_tokens(self, text: str, mark: str) -> str:
        """``text`` with ``mark`` inside each special token's text, see ``encode_pieces``.

        Unchanged without pieces (``has_pieces``).
        """
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._marked(match.group(), mark), text)

    def decode(self, ids: Sequence[int] | Int32Array, *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD. Ids without a text are left out."""
        listed = [int(i) for i in ids]
        with self._lock:
            return self._backend.decode(listed, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty when the id has no text."""
        return self.bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token for display; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _marked(self, token: str, mark: str) -> str:
        is_special = int(self._control_ids[token][0]) in self.special_ids
        return mark.join(token) if is_special else token

    def _piece_ids(self, piece: str, literal_mark: str) -> Int32Array:
        ids = self._cache.get(piece)
        if ids is None:
            if literal_mark and literal_mark in piece:
                # Not remembered: without its mark the piece would mean something else.
                return self._backend.encode(piece.replace(literal_mark, ""), literal=True)
            ids = self._backend.encode(piece)
            self._cache.put(piece, ids)
        return ids


class TokenBytes(dict[int, bytes]):
    """By token id, asked of the backend once: a look-up for every token of every step."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._backend.token_bytes(token_id)
        return found


def _find_backend(directory: Path) -> Backend:
    file = directory / "tokenizer.json"
    if file.is_file():
        return LibraryBackend.from_file(file)
    if (directory / tiktoken_backend.FILE).is_file():
        return TiktokenBackend.from_dir(directory)
    raise ModelLoadError(f"no tokenizer.json in {directory}, and no {tiktoken_backend.FILE}")

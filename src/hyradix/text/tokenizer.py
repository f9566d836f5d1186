"""Text to token ids and back, over the ``tokenizers`` library.

Owns: the library object, end-of-sequence and special ids, the piece cache.
Does not know: chats, requests, streams (``detokenizer.py`` decodes incrementally).
Invariants: ids equal the library's for the same text; thread-safe.

Control tokens in text: ``encode`` parses them, as users of other engines expect of a raw prompt.
``encode_pieces`` can treat marked text literally; ``chat_template.py`` uses it so that the text
of a message cannot produce control tokens.
Read next: ``pieces.py``, ``chat_template.py``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from hyradix.errors import InvalidParameterError, ModelLoadError
from hyradix.request import Int32Array
from hyradix.text.byte_alphabet import token_to_bytes
from hyradix.text.model_files import declared_eos_ids, special_tokens
from hyradix.text.pieces import PieceCache, control_pattern, is_byte_level

_CACHE_CHARS = 1 << 23
_LONG_CHARS = 1 << 14
"""Longer text is encoded without Python's lock, so that other threads run meanwhile."""


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
    """A tokenizer of one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()
        self._pattern = control_pattern(backend)
        self._cache = PieceCache(_CACHE_CHARS)
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._control_ids = {t.content: np.array([i], np.int32) for i, t in added.items()}
        self.special_tokens = dict(special_tokens or {})
        """Named special tokens, for templates."""
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        named = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        eos = [*eos_token_ids, *([] if named is None else [named])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        self.is_byte_level = is_byte_level(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens that have a text; a model's logits may be padded beyond it."""
        self.longest_token: int = max(
            map(len, backend.get_vocab(with_added_tokens=True)), default=1
        )
        """Characters that one token can stand for at most (before normalisation)."""

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory. Raises ``ModelLoadError``."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"no tokenizer.json in {directory}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error
        return cls(
            backend,
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
        if not add_special_tokens or not self._backend.num_special_tokens_to_add(False):
            return self.encode_pieces(text).ids
        with self._lock:
            return self._ids_of(text, add_special_tokens=True)

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
                ids = self._ids_of(plain)
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
            text: str = self._backend.decode(listed, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty when the id has no text."""
        cached = self._bytes.get(token_id)
        if cached is None:
            token = self._backend.id_to_token(token_id)
            is_plain = token_id in self.special_ids
            cached = token_to_bytes(token or "", is_byte_level=self.is_byte_level or is_plain)
            self._bytes[token_id] = cached
        return cached

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
                return self._literal_ids(piece.replace(literal_mark, ""))
            ids = self._ids_of(piece)
            self._cache.put(piece, ids)
        return ids

    def _literal_ids(self, text: str) -> Int32Array:
        self._backend.encode_special_tokens = True
        try:
            return self._ids_of(text)
        finally:
            self._backend.encode_special_tokens = False

    def _ids_of(self, text: str, *, add_special_tokens: bool = False) -> Int32Array:
        try:
            if len(text) > _LONG_CHARS:  # of the library's calls only the batch one lets go
                (encoding,) = self._backend.encode_batch(
                    [text], add_special_tokens=add_special_tokens
                )
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (
            TypeError,
            UnicodeEncodeError,
        ) as error:  # which one depends on the library's version
            raise InvalidParameterError(
                "the text is not valid Unicode (a lone surrogate)"
            ) from error
        return np.array(encoding.ids, dtype=np.int32)

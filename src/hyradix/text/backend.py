"""What ``Tokenizer`` asks of the library that knows a vocabulary, and the form of it for one.

Owns: the ``Backend`` interface and ``LibraryBackend`` (``tokenizer.json``).
Does not know: caches, chats, end-of-sequence ids.
Invariant: not thread-safe: ``Tokenizer`` calls with its lock held.
Read next: ``tiktoken_backend.py`` (the other form), ``tokenizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from hyradix.errors import InvalidParameterError, ModelLoadError
from hyradix.request import Int32Array
from hyradix.text.byte_alphabet import token_to_bytes
from hyradix.text.pieces import control_pattern, is_byte_level

_LONG_CHARS = 1 << 14
"""Longer text is encoded without Python's lock, so that other threads run meanwhile."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that is found in raw text before anything else. special: it has no text of its own
    in an answer."""

    id: int
    text: str
    is_special: bool


class Backend(Protocol):
    """pattern: finds control tokens where text may be cut at them; None: it must not be cut.

    is_byte_level: the text of ids is their bytes, joined. adds_tokens: ``encode`` may add tokens
    around a text. longest_token: characters that one token can stand for at most.
    """

    control_tokens: tuple[ControlToken, ...]
    pattern: re.Pattern[str] | None
    is_byte_level: bool
    adds_tokens: bool
    vocab_size: int
    longest_token: int

    def encode(self, text: str, *, adds_tokens: bool = False, literal: bool = False) -> Int32Array:
        """Ids of ``text``. literal: special tokens in it are plain text.

        Raises ``InvalidParameterError`` for a lone surrogate.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; those without a text are left out."""

    def token_id(self, text: str) -> int | None:
        """The id of a whole token."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; empty when the id has no text."""


def lone_surrogate() -> InvalidParameterError:
    """The error for text that is no Unicode."""
    return InvalidParameterError("the text is not valid Unicode (a lone surrogate)")


class LibraryBackend:
    """See ``Backend``: an object of the ``tokenizers`` library, which this changes."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self.control_tokens = tuple(
            ControlToken(i, token.content, token.special) for i, token in added.items()
        )
        self.pattern = control_pattern(library)
        self.is_byte_level = is_byte_level(library)
        self.adds_tokens = library.num_special_tokens_to_add(False) > 0
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.longest_token: int = max(
            map(len, library.get_vocab(with_added_tokens=True)), default=1
        )
        self._special_ids = frozenset(t.id for t in self.control_tokens if t.is_special)

    @classmethod
    def from_file(cls, file: Path) -> LibraryBackend:
        """Load a ``tokenizer.json``. Raises ``ModelLoadError``."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error

    def encode(self, text: str, *, adds_tokens: bool = False, literal: bool = False) -> Int32Array:
        """See ``Backend``."""
        self._library.encode_special_tokens = literal
        try:
            if len(text) > _LONG_CHARS:  # of the library's calls only the batch one lets go
                (encoding,) = self._library.encode_batch([text], add_special_tokens=adds_tokens)
            else:
                encoding = self._library.encode(text, add_special_tokens=adds_tokens)
        except (TypeError, UnicodeEncodeError) as error:  # which one depends on its version
            raise lone_surrogate() from error
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See ``Backend``."""
        text: str = self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """See ``Backend``."""
        found: int | None = self._library.token_to_id(text)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Backend``."""
        token = self._library.id_to_token(token_id)
        is_byte_level = self.is_byte_level or token_id in self._special_ids
        return token_to_bytes(token or "", is_byte_level=is_byte_level)

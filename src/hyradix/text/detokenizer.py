"""Token ids to text, one piece at a time.

Owns: what has been decoded but not yet emitted. Does not know: stop strings, requests.
Invariant: the concatenation of all deltas equals ``Tokenizer.decode`` of all ids, and no emitted
character changes later: a character whose bytes are incomplete is held back.
Read next: ``output_stream.py``.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from hyradix.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """A stream: ``feed`` ids, take text; ``finish`` once."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete."""
        ...

    def finish(self) -> str:
        """What was held back; incomplete bytes become U+FFFD."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """The stream for this kind of tokenizer."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For byte-level tokenizers: joins bytes and decodes them as UTF-8. O(1) a token, exact."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._held = b""
        """The beginning of a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """See ``Detokenizer``."""
        bytes_of, skipped = self._bytes_of, self._skipped
        whole = self._held + b"".join([bytes_of[i] for i in token_ids if i not in skipped])
        text, num_decoded = codecs.utf_8_decode(whole, "replace", False)
        self._held = whole[num_decoded:]
        return text

    def finish(self) -> str:
        """See ``Detokenizer``."""
        held, self._held = self._held, b""
        return held.decode("utf-8", errors="replace")


class WindowDetokenizer:
    """For all others: decodes a short window of ids twice, with and without the new ones.

    The window keeps the ids since the last emission and those of the emission before, so that a
    decoder that treats the first token of a text differently sees an inner one. Exact where the
    text of a token depends on at most the tokens of such a window.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_emitted = 0
        """Ids of the window whose text was emitted."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """See ``Detokenizer``."""
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._decode(self._window)[len(self._decode(self._window[: self._num_emitted])) :]

    def _feed_one(self, token_id: int) -> str:
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        before = self._decode(self._window[: self._num_emitted])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

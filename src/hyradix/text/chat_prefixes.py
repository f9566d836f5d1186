"""Where the first messages of a chat end in the text of the whole chat.

Owns: rendering the beginnings of a chat, and a memory of how long each was: the next turn of the
chat asks for the same beginnings again, and rendering them all costs more than all else.
Does not know: tokens, kinds of boundaries.
Invariant: an end is only given where the rendering of the beginning equals the whole's text up
to there (compared by a 128-bit digest when it is remembered).

How an end is found: the first i messages are rendered by themselves. Some templates refuse (they
want a user message) or render the last reply in another way; then a user message with a made-up
text is put after them, and the end is where that text begins: the content of the user message
that follows. Where a template does neither, there is no end.
Read next: ``boundaries.py``.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_PROBE = "QzProbe7Zq"

Render = Callable[[list[dict[str, Any]]], str]
Outline = tuple[int, bytes] | None
"""Length and digest of a rendered beginning; None: the template refuses it."""


class PrefixMemo:
    """Outlines of recent beginnings, least recently used out first. Thread-safe."""

    def __init__(self, max_entries: int = 1 << 16) -> None:
        self._max_entries = max_entries
        self._outlines: OrderedDict[bytes, Outline] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes, compute: Callable[[], Outline]) -> Outline:
        """What is remembered for ``key``, else what ``compute`` returns."""
        with self._lock:
            if key in self._outlines:
                self._outlines.move_to_end(key)
                return self._outlines[key]
        outline = compute()
        with self._lock:
            self._outlines[key] = outline
            if len(self._outlines) > self._max_entries:
                self._outlines.popitem(last=False)
        return outline


class ChatPrefixes:
    """The beginnings of one chat."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        text: str,
        *,
        render: Render,
        memo: PrefixMemo,
        context: object,
    ) -> None:
        """Args:
        text: the whole chat, rendered.
        render: text of some first messages without a generation prompt; may raise anything.
        context: all else that a rendering depends on (JSON-like).
        """
        self._messages = messages
        self._text = text
        self._render = render
        self._memo = memo
        self._keys = [_digest(_canonical(context))]
        for message in messages:
            self._keys.append(_digest(self._keys[-1].hex() + _canonical(message)))

    def end_of(self, count: int) -> int | None:
        """Characters of the whole's text that the first ``count`` messages make up, or None."""
        if count:
            end = self._match(self._keys[count], lambda: self._outline(count))
            if end is not None:
                return end
        if count == len(self._messages) or self._messages[count]["role"] != "user":
            return None
        return self._match(b"probe" + self._keys[count], lambda: self._probed_outline(count))

    def _match(self, key: bytes, compute: Callable[[], Outline]) -> int | None:
        outline = self._memo.get(key, compute)
        if outline is None:
            return None
        length, digest = outline
        return length if _digest(self._text[:length]) == digest else None

    def _outline(self, count: int) -> Outline:
        text = self._try(self._messages[:count])
        return None if text is None else (len(text), _digest(text))

    def _probed_outline(self, count: int) -> Outline:
        text = self._try([*self._messages[:count], {"role": "user", "content": _PROBE}])
        start = -1 if text is None else text.rfind(_PROBE)
        return None if text is None or start < 0 else (start, _digest(text[:start]))

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._render(messages)
        except Exception:  # whatever a template does with half a conversation
            return None


def _canonical(value: object) -> str:
    return json.dumps(value, default=repr)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

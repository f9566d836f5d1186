"""Stop strings, found in a stream of text.

Owns: how much of each stop string the text ends with. Does not know: tokens, requests.

Which match counts: the one that is complete first; of several complete at the same character,
the longest. Text is cut where that match starts. The answer does not depend on how the text was
divided into pieces.
Invariant: emitted text is never taken back; what is held back is exactly the longest end of the
text that could still become a stop string.
Read next: ``output_stream.py``.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """A stream: ``feed`` text until it reports a match, else ``finish``."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        """Args:
        stop_strings: none of them empty.
        include_stop: emit the matched stop string too; nothing is held back then.
        """
        longest_first = sorted(set(stop_strings), key=len, reverse=True)
        self._patterns = [_Pattern(text) for text in longest_first]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to emit, the matched stop string or None).

        Text after a match is dropped, also in later calls.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._patterns:
            return text, None
        for i, char in enumerate(text):
            for pattern in self._patterns:
                if pattern.advance(char):
                    self._matched = pattern.text
                    return self._cut(text[: i + 1], pattern.text), pattern.text
        buffer = self._held + text
        keep = 0 if self._include_stop else max(pattern.num_matched for pattern in self._patterns)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop_string: str) -> str:
        buffer, self._held = self._held + text, ""
        return buffer if self._include_stop else buffer[: len(buffer) - len(stop_string)]


class _Pattern:
    """Knuth-Morris-Pratt: the longest prefix of ``text`` that the stream ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)
        k = 0
        for i in range(1, len(text)):
            while k and text[i] != text[k]:
                k = self._fallback[k - 1]
            k += text[i] == text[k]
            self._fallback[i] = k

    def advance(self, char: str) -> bool:
        """Take one character; say whether the whole text is matched now."""
        k = self.num_matched
        while k and self.text[k] != char:
            k = self._fallback[k - 1]
        self.num_matched = k + (self.text[k] == char)
        return self.num_matched == len(self.text)

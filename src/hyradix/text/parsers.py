"""Splits a reply into reasoning and content, as a stream.

Owns: the tags and the state between them. Does not know: tokens, requests. Off unless a server
is told that its model reasons between tags.
Invariant: the result does not depend on how the text was divided into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Deltas of both parts."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """``<think>reasoning</think>content``: the tags and line breaks after them are dropped.

    A start tag counts only at the very beginning of the reply (after white space); anywhere else
    it is content. Reasoning without an end tag is reasoning to the end.
    """

    def __init__(
        self, start: str = "<think>", end: str = "</think>", *, starts_inside: bool = False
    ) -> None:
        """Args:
        starts_inside: the prompt already ends with the start tag.
        """
        self._start = start
        self._end = end
        self._held = ""
        self._state = "reasoning" if starts_inside else "begin"
        self._skips_breaks = starts_inside

    def feed(self, text: str) -> ParsedText:
        """Take a delta of the reply."""
        if self._state == "begin":
            self._held += text
            begun = self._held.lstrip()
            if len(begun) < len(self._start) and self._start.startswith(begun):
                return ParsedText()
            text, self._held = self._held, ""
            self._state = "content"
            if begun.startswith(self._start):
                self._state, self._skips_breaks = "reasoning", True
                text = begun[len(self._start) :]
        if self._state == "content":
            return ParsedText(content=self._after_breaks(text))
        return self._feed_reasoning(text)

    def finish(self) -> ParsedText:
        """What was held back."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return ParsedText(reasoning=self._after_breaks(held))
        return ParsedText(content=held)

    def _feed_reasoning(self, text: str) -> ParsedText:
        buffer = self._held + text
        reasoning, tag, rest = buffer.partition(self._end)
        if not tag:
            keep = _num_begun(buffer, self._end)
            self._held = buffer[len(buffer) - keep :]
            return ParsedText(reasoning=self._after_breaks(buffer[: len(buffer) - keep]))
        self._held = ""
        reasoning = self._after_breaks(reasoning)
        self._state, self._skips_breaks = "content", True
        return ParsedText(reasoning, self._after_breaks(rest))

    def _after_breaks(self, text: str) -> str:
        if self._skips_breaks:
            text = text.lstrip("\n")
            self._skips_breaks = not text
        return text


def _num_begun(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` (not all of it)."""
    longest = min(len(tag) - 1, len(text))
    return next((k for k in range(longest, 0, -1) if text.endswith(tag[:k])), 0)

"""The text of one reply, from its token ids as they come.

Owns: the order of things for one request: detokenise, then look for stop strings.
Does not know: when a request ends otherwise (``max_tokens``, end of sequence), transport.
Invariant: the concatenated text does not depend on how the ids were divided into calls.
Read next: ``detokenizer.py``, ``stop.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hyradix.request import SamplingParams
from hyradix.text.detokenizer import make_detokenizer
from hyradix.text.stop import StopMatcher
from hyradix.text.tokenizer import Tokenizer


class StreamStep(msgspec.Struct, frozen=True, gc=False):
    """What one call of ``OutputStream.feed`` brought.

    text: safe to send on.
    num_kept_tokens: how many of the fed tokens belong to the reply, when a stop string was
        completed: the token that completed it is the last one kept. None: no stop string.
    stop_string: the one matched, or None.
    """

    text: str
    num_kept_tokens: int | None = None
    stop_string: str | None = None


class OutputStream:
    """Feeds on the output tokens of one request, in order, each once."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcher(
            params.stop_strings, include_stop=params.include_stop_str_in_output
        )
        self._has_stops = bool(params.stop_strings)
        self._min_tokens = params.min_tokens
        self._shows_ending = params.include_stop_str_in_output
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int], *, is_ended_by_last: bool = False) -> StreamStep:
        """Take new output tokens.

        Args:
            is_ended_by_last: the last token is what ended the request (end of sequence or one of
                ``stop_token_ids``). Its text is left out, unless ``include_stop_str_in_output``.

        Stop strings count from the first token after ``min_tokens`` on: text before is emitted
        unseen. After a match, do not call ``feed`` again.
        """
        shown = token_ids
        if is_ended_by_last and not self._shows_ending:
            shown = token_ids[:-1]
        if not self._has_stops:
            return StreamStep(self._detokenizer.feed(shown))
        parts: list[str] = []
        for i, token_id in enumerate(shown):
            text, stop_string = self._take(self._detokenizer.feed((token_id,)))
            parts.append(text)
            if stop_string is not None:
                return StreamStep("".join(parts), i + 1, stop_string)
        return StreamStep("".join(parts))

    def finish(self) -> str:
        """The text held back, when the request ended in another way; "" after a match."""
        text, _ = self._matcher.feed(self._detokenizer.finish())
        return text + self._matcher.finish()

    def _take(self, text: str) -> tuple[str, str | None]:
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.feed(text)

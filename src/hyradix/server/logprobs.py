"""Log probabilities in the three shapes that the wire has for them.

Owns: the shapes. Does not know: requests. Texts come from the engine, which detokenises.
Read next: ``completions.py``, ``chat.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hyradix.engine.messages import TokenLogprob
from hyradix.server.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobsWire,
    PromptLogprobWire,
    TopLogprob,
)


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The ``logprobs`` of a chat choice."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=entry.text,
                logprob=entry.logprob,
                bytes=list(entry.text.encode()),
                top_logprobs=[
                    TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))
                    for _, logprob, text in entry.top
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], *, offset: int, first_text: str = ""
) -> CompletionLogprobs:
    """The ``logprobs`` of a completion choice.

    Args:
        entries: one per token; None where there is nothing before the token (a prompt's first).
        offset: where the first of these tokens stands in the choice's text.
        first_text: text of the token whose entry is None.

    The sampled token is always among ``top_logprobs``; of alternatives that decode to one text
    (parts of characters do), the likeliest counts.
    """
    tokens, offsets = [], []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        text = first_text if entry is None else entry.text
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        tops.append(None if entry is None else _top_by_text(entry))
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if entry is None else entry.logprob for entry in entries],
        top_logprobs=tops,
        text_offset=offsets,
    )


def _top_by_text(entry: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for _, logprob, text in entry.top:
        top.setdefault(text, logprob)
    top.setdefault(entry.text, entry.logprob)
    return top


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> PromptLogprobsWire:
    """The ``prompt_logprobs`` of a choice, in the form that vLLM's clients know."""
    return [None if entry is None else _candidates(entry) for entry in entries]


def _candidates(entry: TokenLogprob) -> dict[str, PromptLogprobWire]:
    candidates = {
        str(token_id): PromptLogprobWire(logprob=logprob, rank=rank, decoded_token=text)
        for rank, (token_id, logprob, text) in enumerate(entry.top, start=1)
    }
    candidates[str(entry.token_id)] = PromptLogprobWire(
        logprob=entry.logprob, rank=entry.rank, decoded_token=entry.text
    )
    return candidates

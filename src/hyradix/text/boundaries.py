"""Positions of a rendered chat at which another chat may go on differently.

Owns: which places are tried, and which kind wins where several fall together.
Does not know: Jinja, tokenizers: it is given a function that renders the first messages of the
chat, and one that turns a text position into a token position (or refuses).

How a place is found: the first i messages are rendered by themselves. If that is a prefix of the
whole, its end is the place. Some templates cannot do it (they want a user message, or treat the
last reply in another way); then a user message with a made-up text is put after the i messages
and the place is where that text begins: the start of the following user turn's content.
A template that refuses both yields no boundary there.
Read next: ``chat_template.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hyradix.request import Boundary, BoundaryKind
from hyradix.text.tokenizer import PieceEncoding

_VALUE = {
    BoundaryKind.TURN: 0,
    BoundaryKind.LAST: 1,
    BoundaryKind.SYSTEM: 2,
    BoundaryKind.MARK: 3,
}
_PROBE = "QzProbe7Zq"
_MAX_TURNS = 32
"""User turns tried, the latest ones: rendering the start of a chat costs time at each."""

Render = Callable[[list[dict[str, Any]]], str]


def find_boundaries(
    messages: list[dict[str, Any]],
    marks: Sequence[bool],
    whole: PieceEncoding,
    *,
    render: Render,
    num_tokens_at: Callable[[int], int | None],
) -> tuple[Boundary, ...]:
    """The boundaries of a chat, strictly increasing in position.

    Args:
        messages: normalised; a checkpoint mark for each in ``marks``.
        whole: all of them, rendered and tokenised.
        render: text of the first messages, without a generation prompt; may raise anything.
        num_tokens_at: number of tokens of the whole's first characters, None where they would be
            tokenised differently by themselves.
    """
    found: dict[int, BoundaryKind] = {}
    ends: dict[int, int | None] = {}
    for count, kind in _candidates(messages, marks):
        if count not in ends:
            ends[count] = _end_of(messages, count, whole.text, render)
        cut = ends[count]
        position = num_tokens_at(cut) if cut else None
        if position and _VALUE[kind] >= _VALUE[found.get(position, BoundaryKind.TURN)]:
            found[position] = kind
    return tuple(Boundary(position, found[position]) for position in sorted(found))


def _candidates(
    messages: list[dict[str, Any]], marks: Sequence[bool]
) -> Iterator[tuple[int, BoundaryKind]]:
    """(number of first messages, kind of the boundary at their end)."""
    roles = [message["role"] for message in messages]
    num_system = next(
        (i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles)
    )
    yield num_system, BoundaryKind.SYSTEM
    turns = [i for i, role in enumerate(roles) if role == "user" and i > 0]
    for i in turns[-_MAX_TURNS:]:
        yield i, BoundaryKind.TURN
    for i, is_marked in enumerate(marks):
        if is_marked:
            yield i + 1, BoundaryKind.MARK
    yield len(messages), BoundaryKind.LAST


def _end_of(messages: list[dict[str, Any]], count: int, text: str, render: Render) -> int | None:
    """Where in ``text`` the first ``count`` messages end, in characters."""
    if count:
        alone = _try(render, messages[:count])
        if alone is not None and text.startswith(alone):
            return len(alone)
    if count == len(messages) or messages[count]["role"] != "user":
        return None
    probed = _try(render, [*messages[:count], {"role": "user", "content": _PROBE}])
    start = -1 if probed is None else probed.rfind(_PROBE)
    if probed is None or start < 0 or not text.startswith(probed[:start]):
        return None
    return start


def _try(render: Render, messages: list[dict[str, Any]]) -> str | None:
    try:
        return render(messages)
    except Exception:  # whatever a template does with half a conversation
        return None

"""Positions of a rendered chat at which another chat may go on differently.

Owns: which places are tried, and which kind wins where several fall together.
Does not know: Jinja, tokenizers: it is given functions that tell where the first messages end.
Read next: ``chat_template.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hyradix.request import Boundary, BoundaryKind

_VALUE = {
    BoundaryKind.TURN: 0,
    BoundaryKind.LAST: 1,
    BoundaryKind.SYSTEM: 2,
    BoundaryKind.MARK: 3,
}
_MAX_TURNS = 32
"""User turns tried, the latest ones: rendering the start of a chat costs time at each."""


def find_boundaries(
    roles: Sequence[str],
    marks: Sequence[bool],
    *,
    end_of: Callable[[int], int | None],
    num_tokens_at: Callable[[int], int | None],
) -> tuple[Boundary, ...]:
    """The boundaries of a chat, strictly increasing in position.

    Args:
        roles: of the messages.
        marks: whether the caller marked them.
        end_of: where the first so many messages end in the text, None if they do not begin it.
        num_tokens_at: number of tokens of the text's first characters, None where they would be
            tokenised differently by themselves.

    Of several kinds at one position the most valuable is reported: MARK, SYSTEM, LAST, TURN.
    """
    found: dict[int, BoundaryKind] = {}
    positions: dict[int, int | None] = {}
    for count, kind in _candidates(roles, marks):
        if count not in positions:
            cut = end_of(count)
            positions[count] = num_tokens_at(cut) if cut else None
        position = positions[count]
        if position and _VALUE[kind] >= _VALUE[found.get(position, BoundaryKind.TURN)]:
            found[position] = kind
    return tuple(Boundary(position, found[position]) for position in sorted(found))


def _candidates(roles: Sequence[str], marks: Sequence[bool]) -> Iterator[tuple[int, BoundaryKind]]:
    """(number of first messages, kind of the boundary at their end)."""
    others = (i for i, role in enumerate(roles) if role not in ("system", "developer"))
    yield next(others, len(roles)), BoundaryKind.SYSTEM
    turns = [i for i, role in enumerate(roles) if role == "user" and i > 0]
    for i in turns[-_MAX_TURNS:]:
        yield i, BoundaryKind.TURN
    for i, is_marked in enumerate(marks):
        if is_marked:
            yield i + 1, BoundaryKind.MARK
    yield len(roles), BoundaryKind.LAST

"""Where a request leaves state checkpoints while its prompt is prefilled (DESIGN section 4).

Owns: the candidate positions and how much each is worth keeping. Does not know: slots, the tree.
Invariants: candidates lie in (num_cached_tokens, n-1], strictly increasing; n-1 is always one of
them (so that the same prompt, sent again, resumes there); rungs of the ladder are never urgent.
Read next: ``prefix_cache.py``, which finds slots for them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from hyradix.request import Boundary, BoundaryKind


class CheckpointKind(enum.StrEnum):
    """Why a state is kept at a position; the order is the order of worth, best first."""

    PROMPT_END = "prompt_end"
    REPLY_END = "reply_end"
    BRANCH = "branch"
    MARK = "mark"
    SYSTEM = "system"
    LAST = "last"
    TURN = "turn"
    TRACK = "track"
    CHUNK_END = "chunk_end"
    LADDER = "ladder"


LADDER_STEP = 128
"""Tokens between the last rungs before the end of a prompt."""

LADDER_STRETCH = 512
"""A stretch without any candidate that is shorter than this gets no ladder."""

_RANK = {kind: rank for rank, kind in enumerate(CheckpointKind)}
_OF_BOUNDARY = {
    BoundaryKind.MARK: CheckpointKind.MARK,
    BoundaryKind.SYSTEM: CheckpointKind.SYSTEM,
    BoundaryKind.LAST: CheckpointKind.LAST,
    BoundaryKind.TURN: CheckpointKind.TURN,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position worth a checkpoint. ``is_urgent``: worth evicting another state for."""

    position: int
    kind: CheckpointKind
    is_urgent: bool


def plan_candidates(
    *,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_kv_tokens: int,
    boundaries: Iterable[Boundary],
    min_gain: int,
    max_checkpoints: int,
) -> list[Candidate]:
    """The checkpoints to try for, in ascending order.

    A candidate that saves fewer than ``min_gain`` tokens over the urgent one before it is taken
    only where a slot is free (``is_urgent`` False); so is a boundary whose KV is there already
    (it had a state, and the policy let it go: where requests part now, the branch, is worth more).
    The prompt's end is always there and urgent, whatever ``max_checkpoints``.
    """
    last = num_prompt_tokens - 1
    kinds: dict[int, CheckpointKind] = {}
    wanted = [(b.position, _OF_BOUNDARY[b.kind]) for b in boundaries]
    if num_kv_tokens > num_cached_tokens:
        wanted.append((num_kv_tokens, CheckpointKind.BRANCH))
    wanted.append((last, CheckpointKind.PROMPT_END))
    for position, kind in wanted:
        if not num_cached_tokens < position <= last:
            continue
        if position not in kinds or _RANK[kind] < _RANK[kinds[position]]:
            kinds[position] = kind
    top = max([num_kv_tokens, *(p for p in kinds if p < last)])
    for position in _ladder(top, last, min_gain):
        kinds[position] = CheckpointKind.LADDER
    chosen = sorted(kinds, key=lambda p: (_RANK[kinds[p]], -p))[: max(max_checkpoints, 1)]
    result: list[Candidate] = []
    above = num_cached_tokens
    for position in sorted(chosen):
        kind = kinds[position]
        urgent = kind is CheckpointKind.PROMPT_END or (
            kind is not CheckpointKind.LADDER
            and position - above >= min_gain
            and position >= num_kv_tokens
        )
        result.append(Candidate(position, kind, urgent))
        if urgent:
            above = position
    return result


def _ladder(top: int, last: int, min_gain: int) -> set[int]:
    """Extra positions in a long stretch (top, last) that has no candidate of its own.

    Dense before the end, where the next turn of a conversation parts from this one; doubling
    distances from both ends for the rest, so that a later fork loses a part of its depth at most.
        top |--512--|------1024------|-- ... --|-------1024-------|--512--|-128-|-128-|-128-| last
    """
    if last - top < LADDER_STRETCH:
        return set()
    rungs = {last - i * LADDER_STEP for i in range(1, LADDER_STRETCH // LADDER_STEP)}
    distance = LADDER_STRETCH
    while distance < last - top:
        rungs |= {top + distance, last - distance}
        distance *= 2
    return {position for position in rungs if top + min_gain <= position < last}

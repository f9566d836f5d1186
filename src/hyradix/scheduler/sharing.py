"""Waiting for a prefix that somebody else is just computing.

Owns: which running request is about to leave a state that a waiting one could resume from, asking
it for one where the two part (the longest common prefix is a checkpoint candidate), and whether
there is one that was not worth waiting for.
Invariant: nobody waits for a request that is not prefilling any more, so the wait always ends.
Source: DESIGN section 5, prefill. Read next: ``scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from hyradix.cache.node import TOKEN_BYTES, Match
from hyradix.cache.placement import CheckpointKind
from hyradix.cache.prefix_cache import PrefixCache
from hyradix.cache.tree import common_prefix
from hyradix.request import MissReason
from hyradix.scheduler.request_state import RequestState, Status


def is_still_waiting(state: RequestState) -> bool:
    """Whether the state that ``state`` waits for is still to come."""
    if state.waits_for is None:
        return False
    provider, depth = state.waits_for
    if provider.is_prefilling and provider.num_computed_tokens < depth:
        return True
    state.waits_for = None
    return False


def ask_for_shared(state: RequestState, others: Iterable[RequestState], cache: PrefixCache) -> None:
    """Have the prefilling ``state`` leave a state where each of ``others`` parts from it."""
    if state.holding is None or not state.is_prefilling:
        return
    mine = state.tokens.to_bytes()[: (state.prefill_end - 1) * TOKEN_BYTES]
    for other in others:
        if other.request.namespace != state.request.namespace:
            continue
        wanted = other.tokens.to_bytes()[: max(other.match_limit, 0) * TOKEN_BYTES]
        shared = common_prefix(mine, wanted)
        if shared - state.num_scheduled_tokens >= cache.config.min_gain:
            cache.promise(state.holding, shared, state.num_scheduled_tokens)


def find_provider(
    state: RequestState,
    tokens: bytes,
    match: Match,
    running: Iterable[RequestState],
    cache: PrefixCache,
) -> tuple[RequestState, int] | None:
    """The prefilling request that will leave the deepest state on ``tokens``, and its depth."""
    best: tuple[RequestState, int] | None = None
    wanted = tokens[: state.match_limit * TOKEN_BYTES]
    for other in running:
        if not other.is_prefilling or other.request.namespace != state.request.namespace:
            continue
        theirs = other.tokens.to_bytes()[: (other.prefill_end - 1) * TOKEN_BYTES]
        shared = common_prefix(theirs, wanted)
        if shared - match.num_cached_tokens < cache.config.min_gain:
            continue
        assert other.holding is not None
        depth = cache.promise(other.holding, shared, other.num_scheduled_tokens)
        if depth > (best[1] if best else match.num_cached_tokens):
            best = (other, depth)
    return best


def is_being_written(state: RequestState, match: Match, running: Iterable[RequestState]) -> bool:
    """Whether more is missed because a step that is not committed leaves the state for it."""
    if match.reason is MissReason.NONE:
        return False
    wanted = state.tokens.to_bytes()[: state.match_limit * TOKEN_BYTES]
    for other in running:
        is_publishing = other.holding is not None and other.status is not Status.FINISHING
        if not is_publishing or other.request.namespace != state.request.namespace:
            continue
        assert other.holding is not None
        depths = [
            save.depth
            for save in other.holding.pending
            if save.depth > match.num_cached_tokens and save.kind is not CheckpointKind.TRACK
        ]
        if depths and min(depths) <= common_prefix(other.tokens.to_bytes(), wanted):
            return True
    return False

"""Listens at the two allocators: what a step may not name, and what it is the first to write.

Owns: the slots given back since the step under construction was begun, and those handed out since
``take``. Changes nothing; wraps the allocators' methods in place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.request import ScheduledBatch


class SlotWatch:
    """See the module's docstring."""

    def __init__(self, cache: PrefixCache) -> None:
        self._freed_kv: set[int] = set()
        self._freed_states: set[int] = set()
        self._taken_kv: list[np.ndarray] = []
        self._taken_states: list[int] = []
        _listen(cache.kv, "begin_step", lambda _, __: self._freed_kv.clear())
        _listen(cache.kv, "free", lambda args, _: self._freed_kv.update(args[0].tolist()))
        _listen(cache.kv, "allocate", lambda _, slots: self._taken_kv.append(slots))
        _listen(cache.states, "begin_step", lambda _, __: self._freed_states.clear())
        _listen(cache.states, "release", lambda args, _: self._freed_states.add(args[0]))
        _listen(cache.states, "_take", lambda _, slot: self._taken_states.append(slot))

    def check(self, batch: ScheduledBatch) -> None:
        """A slot given back while this step was built is first handed out in the next one."""
        states = {op.destination for op in batch.state_ops} | {op.source for op in batch.state_ops}
        states |= {save.slot for save in batch.saves} | set(batch.state_slots.tolist())
        assert not states & self._freed_states, "a state slot is used in the step that freed it"
        for update in batch.kv_updates:
            named = set(update.values.tolist())
            assert not named & self._freed_kv, "a KV slot is used in the step that freed it"

    def take(self) -> tuple[list[np.ndarray], list[int]]:
        """KV and state slots handed out since the last call."""
        taken = self._taken_kv, self._taken_states
        self._taken_kv, self._taken_states = [], []
        return taken


def _listen(owner: object, name: str, hear: Callable[[tuple, object], object]) -> None:
    method = getattr(owner, name)

    def wrapped(*args: object) -> object:
        result = method(*args)
        hear(args, result)
        return result

    setattr(owner, name, wrapped)

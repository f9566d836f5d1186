"""A bounded memory of prefixes whose state is gone or was never kept, and why.

Owns: (namespace, depth, digest) -> reason, least recently noted forgotten first. It lives beside
the tree, never in it, so that it outlives nodes and costs no slot.
Read next: ``tree.py``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from hyradix.request import MissReason, Namespace

Key = tuple[Namespace, int, int]


class Fates:
    """At most ``capacity`` entries."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Key, MissReason] = OrderedDict()
        self._at_depth: Counter[int] = Counter()

    def note(self, namespace: Namespace, depth: int, digest: int, reason: MissReason) -> None:
        """Remember why there is no state at this point."""
        key = (namespace, depth, digest)
        if key in self._entries:
            self._entries.move_to_end(key)
        else:
            self._at_depth[depth] += 1
        self._entries[key] = reason
        if len(self._entries) > self._capacity:
            self._drop(next(iter(self._entries)))

    def forget(self, namespace: Namespace, depth: int, digest: int) -> None:
        """There is a state there now."""
        key = (namespace, depth, digest)
        if key in self._entries:
            self._drop(key)

    def has_any(self, depth: int) -> bool:
        """Whether anything is remembered at ``depth`` (if not, no digest is worth computing)."""
        return depth in self._at_depth

    def reason(self, namespace: Namespace, depth: int, digest: int) -> MissReason | None:
        """Why there is none, if it is remembered."""
        return self._entries.get((namespace, depth, digest))

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        depth = key[1]
        self._at_depth[depth] -= 1
        if not self._at_depth[depth]:
            del self._at_depth[depth]

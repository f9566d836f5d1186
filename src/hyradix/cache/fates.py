"""A bounded memory of prefixes whose state is gone or was never kept, and why.

Owns: (namespace, depth, digest) -> reason, least recently noted forgotten first. It lives beside
the tree, never in it, so that it outlives nodes and costs no slot.
Read next: ``tree.py``.
"""

from __future__ import annotations

from collections import OrderedDict

from hyradix.request import MissReason, Namespace

Key = tuple[Namespace, int, int]


class Fates:
    """At most ``capacity`` entries."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Key, MissReason] = OrderedDict()

    def note(self, namespace: Namespace, depth: int, digest: int, reason: MissReason) -> None:
        """Remember why there is no state at this point."""
        key = (namespace, depth, digest)
        self._entries[key] = reason
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def forget(self, namespace: Namespace, depth: int, digest: int) -> None:
        """There is a state there now."""
        self._entries.pop((namespace, depth, digest), None)

    def reason(self, namespace: Namespace, depth: int, digest: int) -> MissReason | None:
        """Why there is none, if it is remembered."""
        return self._entries.get((namespace, depth, digest))

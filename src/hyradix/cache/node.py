"""What the radix tree is made of, and the values it hands out.

Owns: the shapes of ``Node``, ``StateRef``, ``Match``, ``Receipt``. No behaviour beyond accessors.
Invariants of a node: ``len(key) == 4 * len(kv_slots)``; ``depth`` is the token position at its
END; a state, if there is one, is the state at exactly ``depth`` and its digest is the node's.
Read next: ``tree.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from hyradix.request import Int32Array, MissReason, Namespace

TOKEN_BYTES = 4
"""Keys are little-endian int32 buffers: comparing two is one memcmp."""

EMPTY_SLOTS: Int32Array = np.empty(0, dtype=np.int32)


def new_hasher(namespace: Namespace) -> xxhash.xxh3_64:
    """The streaming digest of an empty prefix in ``namespace`` (a structured, unambiguous key)."""
    return xxhash.xxh3_64(msgspec.msgpack.encode(namespace))


@dataclass(frozen=True, slots=True)
class StateRef:
    """The state at exactly ``depth`` of the prefix with ``digest``, in state slot ``slot``."""

    slot: int
    depth: int
    digest: int
    step: int
    """The step that wrote it."""


class Node:
    """One segment of the tree. See the module's invariants; only ``RadixTree`` writes it."""

    __slots__ = (
        "children",
        "depth",
        "hasher",
        "key",
        "kv_lock",
        "kv_slots",
        "last_use",
        "node_id",
        "parent",
        "root",
        "state",
        "state_last_use",
        "state_lock",
        "uses",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        key: bytes,
        kv_slots: Int32Array,
        hasher: xxhash.xxh3_64,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.key = key
        self.kv_slots = kv_slots
        self.depth: int = (0 if parent is None else parent.depth) + len(kv_slots)
        self.hasher = hasher
        self.children: dict[bytes, Node] = {}
        self.state: StateRef | None = None
        self.kv_lock = 0
        self.state_lock = 0
        self.last_use = 0
        self.state_last_use = 0
        self.uses = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of this segment."""
        return len(self.kv_slots)

    @property
    def digest(self) -> int:
        """Hash of the namespace and the whole prefix down to this node's end."""
        return int(self.hasher.intdigest())

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs below."""
        return not self.children

    @property
    def is_tombstone(self) -> bool:
        """KV without a state."""
        return self.state is None and self.parent is not None

    def __repr__(self) -> str:
        state = f", state {self.state.slot}" if self.state else ""
        return f"<node {self.node_id}: {self.num_tokens} tokens to {self.depth}{state}>"


@dataclass(frozen=True, slots=True)
class Match:
    """What ``match_prefix`` found; valid until the tree changes (``version``).

    kv_node is the deepest node touched and ``kv_offset`` how many of its tokens match (all of
    them unless the match ends inside). ``kv_slots``: ``int32[num_kv_tokens]``.
    """

    namespace: Namespace
    version: int
    num_kv_tokens: int = 0
    num_cached_tokens: int = 0
    kv_node: Node | None = None
    kv_offset: int = 0
    state_node: Node | None = None
    kv_slots: Int32Array = field(default_factory=lambda: EMPTY_SLOTS)
    reason: MissReason = MissReason.COLD


@dataclass(slots=True)
class Receipt:
    """What ``lock`` returns and ``unlock_*`` take. Locks are counted on nodes, owned by this."""

    kv_node: Node | None
    state_node: Node | None


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What ``insert`` did.

    node: where the inserted prefix ends.
    replaced: (start, slots): the tree's slots, to be written to the row from ``start`` on.
    duplicates: the caller's slots that the tree already had others for; to be freed.
    is_state_kept: False when the node already had a state (the caller frees its own).
    """

    node: Node
    replaced: tuple[tuple[int, Int32Array], ...] = ()
    duplicates: Int32Array = field(default_factory=lambda: EMPTY_SLOTS)
    is_state_kept: bool = False

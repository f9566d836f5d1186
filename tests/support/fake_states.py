"""How the fake data plane keeps a decoding row's state: in place, to be replayed, or in a log.

Owns: what each row has consumed past its working state. In place (``snapshot``, plain decode): the
working slot moves with every step. ``replay``: the tokens of the last round are held and consumed
when the next one begins. ``log``: they are held until the log is full (at times earlier), and then
consumed only as far as the host has committed. A ``StateFold`` ends both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import xxhash

from hyradix.config import EngineConfig
from hyradix.request import StateFold


def consume(state: int, token: int) -> int:
    """The state after one more token."""
    return xxhash.xxh3_64_intdigest(
        int(state).to_bytes(8, "little") + int(token).to_bytes(8, "little", signed=True)
    )


def consume_all(state: int, tokens: list[int]) -> int:
    """The state after some more."""
    for token in tokens:
        state = consume(state, token)
    return state


@dataclass
class Held:
    """A row whose working state is at depth ``base`` and which has consumed ``tokens`` since."""

    base: int
    tokens: list[int] = field(default_factory=list)


class RowStates:
    """See the module's docstring. ``most_logged``: the fullest that any log has been."""

    def __init__(self, config: EngineConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._held: dict[int, Held] = {}
        self._slots: dict[int, int] = {}
        self.most_logged = 0

    def enter(self, row: int) -> None:
        """A request enters the row: all that was known of it is void."""
        self._held.pop(row, None)
        self._slots[row] = -1

    def name(self, row: int, slot: int) -> None:
        """A step names the row with this working slot."""
        assert row in self._slots, "a step names a row that nobody entered, or that was folded"
        assert self._slots[row] in (-1, slot), "the working slot of a row changed"
        self._slots[row] = slot

    def prefill(self, row: int) -> None:
        """Prefill is always in place."""
        assert row not in self._held, "a prefill of a row that has decoded"

    def begin(
        self, row: int, working: int, start: int, committed: int, most: int
    ) -> tuple[int, int]:
        """A decode at ``start`` begins that consumes at most ``most``: (working state, state)."""
        if not self._config.defers_state:
            return working, working
        held = self._held.setdefault(row, Held(start))
        assert held.base + len(held.tokens) == start, "a row decodes elsewhere than it stopped"
        moved = self._num_moved(held, start, committed, most)
        working = consume_all(working, held.tokens[:moved])
        held.base += moved
        del held.tokens[:moved]
        return working, consume_all(working, held.tokens)

    def _num_moved(self, held: Held, start: int, committed: int, most: int) -> int:
        rows = self._config.num_log_rows
        if not rows:
            assert not held.tokens or start <= committed + 1, "a state moves past what is kept"
            return len(held.tokens)
        is_full = len(held.tokens) + most > rows
        if not is_full and self._rng.random() < 0.8:
            return 0
        moved = max(min(committed, start) - held.base, 0)
        assert len(held.tokens) - moved + most <= rows, "the log does not hold what may come"
        return moved

    def end(self, row: int, working: int, state: int, consumed: list[int]) -> int:
        """That decode has consumed these and come to ``state``; what the working slot holds now."""
        if not self._config.defers_state:
            return state
        self._held[row].tokens += consumed
        self.most_logged = max(self.most_logged, len(self._held[row].tokens))
        return working

    def fold(self, fold: StateFold, working: int) -> int:
        """The working state at exactly ``fold.depth``; the row is done with."""
        assert self._config.defers_state, "nothing is deferred"
        assert self._slots.pop(fold.row) == fold.slot, "a fold of somebody else's working slot"
        assert fold.row in self._held, "a fold of a row that has not decoded"
        held = self._held.pop(fold.row)
        count = fold.depth - held.base
        assert 0 <= count <= len(held.tokens), "a fold to a depth that the row does not hold"
        return consume_all(working, held.tokens[:count])

"""How many drafts a request may have in its next step, and what came of the last ones.

Owns: the one place where the size of a round is chosen, and each request's acceptance counts.
Does not know: KV slots, tokens, who proposes. Read next: ``rows.py``.
"""

from __future__ import annotations

from hyradix.scheduler.request_state import RequestState
from hyradix.spec_config import SpecConfig


class Drafting:
    """Every round takes the configured shape."""

    def __init__(self, spec: SpecConfig | None) -> None:
        self._spec = spec

    def limit(self, state: RequestState, num_decoding: int) -> tuple[int, int]:
        """(max_nodes, max_accepted) of the next round of ``state``; (1, 1): no drafts.

        ``num_decoding``: requests that decode in this step, this one included.
        """
        if self._spec is None:
            return 1, 1
        return self._spec.shape.nodes, self._spec.shape.max_accepted

    def learn(self, state: RequestState, num_nodes: int, num_accepted: int) -> None:
        """A round is committed: ``num_nodes`` with the root, ``num_accepted`` drafts without it."""
        state.num_draft_rounds += num_nodes > 1
        state.num_draft_tokens += num_nodes - 1
        state.num_accepted_tokens += num_accepted

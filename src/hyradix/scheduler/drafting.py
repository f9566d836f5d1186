"""How many drafts a request may have in its next step, and what came of the last ones.

Owns: the interface by which the size of a round is chosen; the configured shape, always.
Does not know: KV slots, tokens, who proposes.
Read next: ``automatic_drafting.py`` (who chooses), ``rows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyradix.scheduler.request_state import RequestState
from hyradix.spec_config import SpecConfig

NO_DRAFTS = (1, 1)


class Drafting:
    """Every round takes the configured shape; without one, no round has drafts."""

    topk = 0
    """Children of a node in the step that is being built; 0: as configured."""

    def __init__(self, spec: SpecConfig | None) -> None:
        self._spec = spec

    def admit(self, state: RequestState, num_running: int) -> None:
        """``state`` begins to run, soon one of ``num_running``: decide whether it is followed."""

    def begin_step(self, decodes: Sequence[RequestState], *, is_waited_for: bool) -> bool:
        """These requests decode in the step that is being built. Whether any may have drafts.

        is_waited_for: other requests wait for these to end.
        """
        return self._spec is not None

    def limit(self, state: RequestState) -> tuple[int, int]:
        """(max_nodes, max_accepted) of the next round of ``state``; (1, 1): no drafts."""
        if self._spec is None:
            return NO_DRAFTS
        return self._spec.shape.nodes, self._spec.shape.max_accepted

    def learn(self, state: RequestState, num_nodes: int, num_accepted: int, depth: int) -> None:
        """A round is committed: ``num_nodes`` with the root, ``num_accepted`` drafts without it.

        depth: drafts that could have been accepted one after the other.
        """
        state.num_draft_rounds += num_nodes > 1
        state.num_draft_tokens += num_nodes - 1
        state.num_accepted_tokens += num_accepted

    def learn_time(self, num_rows: int, num_nodes: int, depth: int, seconds: float) -> None:
        """A step of decodes alone took ``seconds``: ``num_nodes`` in all, drafts ``depth`` deep."""

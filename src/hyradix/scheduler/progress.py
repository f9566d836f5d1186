"""What passes between the scheduler and the engine besides batches: news, and who reads tokens.

Owns: the shapes of ``Progress``, ``InFlight``, ``SchedulerCounters``, ``TokenSink``.
Read next: ``scheduler.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from hyradix.request import FinishReason, PromptLogprobs, StepOutput, TokenLogprobs
from hyradix.scheduler.batch_builder import PlannedRow
from hyradix.scheduler.request_state import RequestState


class TokenSink(Protocol):
    """The text side of a request, asked about every committed token."""

    def feed(
        self, state: RequestState, token_ids: list[int], reason: FinishReason | None
    ) -> int | None:
        """How many of ``token_ids`` are kept if a stop string completes inside them, else None.

        ``reason``: why the last of them ends the request, if it does.
        """
        ...


class Progress(msgspec.Struct, frozen=True, gc=False):
    """News of one request after a commit."""

    state: RequestState
    token_ids: list[int] = []
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this is the last news."""
        return self.state.finish_reason is not None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was submitted and not yet committed."""

    step: int
    planned: tuple[PlannedRow, ...]
    folded: tuple[RequestState, ...] = ()
    depth: int = 0
    """See ``RowPlanner.depth_of``."""

    def size(self, output: StepOutput) -> tuple[int, int, int] | None:
        """Rows, nodes and depth of drafts of a step of decodes alone; None for any other."""
        if self.depth < 0:
            return None
        num_rows = len(self.planned)
        return num_rows, int(output.num_nodes.sum()) if self.depth else num_rows, self.depth


class Arrived(msgspec.Struct, frozen=True):
    """A ``StepOutput`` as Python's numbers: an array's items cost ten times more one by one.

    at: where a request row is among those that sampled.
    """

    output: StepOutput
    at: dict[int, int]
    token_ids: list[list[int]]
    num_tokens: list[int]
    is_faulty: list[bool]

    @classmethod
    def of(cls, output: StepOutput) -> Arrived:
        """All of it at once."""
        return cls(
            output,
            {row: i for i, row in enumerate(output.rows.tolist())},
            output.token_ids.tolist(),
            output.num_tokens.tolist(),
            output.is_faulty.tolist(),
        )


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts since start."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    draft_rounds: int = 0
    """Rounds of one request in which drafts were verified."""
    draft_tokens: int = 0
    """Draft nodes verified, roots not counted."""
    accepted_tokens: int = 0
    """Draft nodes accepted; 1 + accepted / rounds is the accept length."""

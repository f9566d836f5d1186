"""One request inside the engine: its tokens, how far it is, and the only place its status changes.

    WAITING --admit--> RUNNING --end--> FINISHING --settle--> FINISHED
    WAITING --end--> FINISHED
    RUNNING --preempt--> PREEMPTED --requeue--> WAITING
    PREEMPTED --end--> FINISHING
    (FINISHING, PREEMPTED: no more is scheduled, but steps in flight may still name its row)

Owns: ``Status`` and its transitions, token counts. Does not know: slots, batches.
Invariants: num_computed_tokens <= num_scheduled_tokens <= number of known tokens (+ those being
sampled in flight); tokens are only appended, and only by commit.
Read next: ``scheduler.py``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hyradix.cache.holding import Holding
from hyradix.request import FinishReason, Int32Array, MissReason, Request


class Status(enum.Enum):
    """See the module's docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHING = "finishing"
    FINISHED = "finished"


_TOKEN = struct.Struct("<i")


class TokenBuffer:
    """A growing little-endian int32 buffer: what keys, digests and token updates are cut from."""

    def __init__(self, tokens: bytes) -> None:
        self._whole: bytes | None = tokens
        self._buffer = bytearray(tokens)
        self.count = len(tokens) // 4
        """Its length; asked several times for every row of every step."""

    def __len__(self) -> int:
        return self.count

    def append(self, token_ids: Sequence[int]) -> None:
        """Add sampled tokens."""
        for token in token_ids:  # mostly one
            self._buffer += _TOKEN.pack(token)
        self.count += len(token_ids)
        self._whole = None

    def to_bytes(self) -> bytes:
        """All tokens. Copied once after each ``append``, then shared."""
        if self._whole is None:
            self._whole = bytes(self._buffer)
        return self._whole

    def array(self) -> Int32Array:
        """All tokens as a read-only ``int32[n]``."""
        return np.frombuffer(self.to_bytes(), dtype="<i4")


@dataclass(slots=True, eq=False)
class RequestState:
    """See the module's docstring. ``max_total_tokens``: prompt and reply may reach this length."""

    request: Request
    max_total_tokens: int
    tokens: TokenBuffer
    arrival: int = 0
    """Order of arrival; the youngest is preempted first, the oldest admitted first."""
    arrival_step: int = 0
    status: Status = Status.WAITING
    holding: Holding | None = None
    num_prompt_tokens: int = 0
    num_scheduled_tokens: int = 0
    """Positions whose computation has been scheduled."""
    num_computed_tokens: int = 0
    """Positions whose computation has been committed (= depth of the quiet working state)."""
    num_in_flight: int = 0
    """Steps in flight that name this request's row."""
    num_sampling: int = 0
    """Tokens being sampled by steps in flight (at least; drafts may bring more)."""
    has_drafts_in_flight: bool = False
    """Its next position is not known before the step in flight is committed."""
    folded_at: int | None = None
    """Depth that its working state is folded to, in a step in flight or committed."""
    is_faulty: bool = False
    """A step's logits were not finite: what is in its state and KV slots is of no use."""
    prefill_end: int = 0
    """Tokens known at admission: up to there it is a prefill, after that a decode."""
    num_admissions: int = 0
    preempted_at: int = 0
    """Tokens computed when it was last preempted."""
    waits_for: tuple[RequestState, int] | None = None
    """A running request, and the depth of a state it is about to provide."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_kv_tokens: int = 0
    miss_reason: MissReason = MissReason.NONE
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    num_draft_rounds: int = 0
    """Rounds in which drafts of it were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_hits: float = 0.0
    """Drafts of it that were accepted; older rounds count less."""
    draft_hopes: float = 0.0
    """Of the same drafts, how many would have been with everybody's chances."""
    is_followed: bool = True
    """Whether the proposer keeps up with it: without it, it cannot draft for it."""

    @classmethod
    def create(cls, request: Request, *, max_context: int, arrival: int = 0) -> RequestState:
        """A waiting request; ``max_total_tokens`` is capped at ``max_context``."""
        num_prompt = request.num_prompt_tokens
        limit = max_context
        if request.sampling.max_tokens is not None:
            limit = min(limit, num_prompt + request.sampling.max_tokens)
        return cls(
            request=request,
            max_total_tokens=limit,
            tokens=TokenBuffer(request.prompt_token_ids),
            arrival=arrival,
            num_prompt_tokens=num_prompt,
            stop_ids=frozenset(request.sampling.stop_token_ids or ()),
        )

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled and committed."""
        return self.tokens.count - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens that have a value on the device once the steps in flight are done."""
        return self.tokens.count + self.num_sampling

    @property
    def match_limit(self) -> int:
        """How many tokens may come from the cache: the last one is always computed.

        With prompt logprobs the logits of position 0 on are asked for, so nothing may (until
        they have been delivered with the first token).
        """
        if self.request.sampling.prompt_logprobs is not None and self.num_output_tokens == 0:
            return 0
        return len(self.tokens) - 1

    def cut(
        self, sampled: list[int], eos: frozenset[int]
    ) -> tuple[list[int], FinishReason | None, int | None]:
        """Where end-of-sequence, a stop token or the length limit ends ``sampled``.

        Returns the tokens up to there, why they end the request (None: they do not) and the stop
        token, if it was one.
        """
        sampling = self.request.sampling
        for i, token in enumerate(sampled):
            num_output = self.tokens.count - self.num_prompt_tokens + i + 1
            if num_output >= sampling.min_tokens:
                if token in eos and not sampling.ignore_eos:
                    return sampled[: i + 1], FinishReason.STOP, None
                if token in self.stop_ids:
                    return sampled[: i + 1], FinishReason.STOP, token
            if self.num_prompt_tokens + num_output >= self.max_total_tokens:
                return sampled[: i + 1], FinishReason.LENGTH, None
        return sampled, None, None

    @property
    def can_run(self) -> bool:
        """Whether a token is there to be computed."""
        num_known = self.tokens.count + self.num_sampling
        return (
            self.status is Status.RUNNING
            and not self.has_drafts_in_flight
            and self.num_scheduled_tokens < num_known
            and num_known < self.max_total_tokens
        )

    @property
    def is_prefill_next(self) -> bool:
        """Whether its next position was known at admission."""
        return self.num_scheduled_tokens < self.prefill_end

    @property
    def is_prefilling(self) -> bool:
        """Running, and part of what was known at admission is not yet computed and committed."""
        return self.status is Status.RUNNING and self.num_computed_tokens < self.prefill_end

    @property
    def is_draining(self) -> bool:
        """No more is scheduled, but its slots come back only when it is quiet."""
        return self.status in (Status.FINISHING, Status.PREEMPTED)

    def admit(self, holding: Holding) -> None:
        """WAITING -> RUNNING at the depth where computing resumes.

        The figures a caller sees (cached tokens, reason) are those of the first admission.
        """
        assert self.status is Status.WAITING
        self.status = Status.RUNNING
        self.holding = holding
        self.waits_for = None
        self.num_scheduled_tokens = self.num_computed_tokens = holding.num_cached_tokens
        self.prefill_end = len(self.tokens)
        self.is_followed = True
        self.folded_at = None
        self.num_admissions += 1
        if self.num_admissions == 1:
            self.num_cached_tokens = holding.num_cached_tokens
            self.num_kv_tokens = holding.num_kv_tokens
            self.miss_reason = holding.miss_reason

    @property
    def state_depth(self) -> int:
        """Tokens that the quiet working state has consumed."""
        return self.num_computed_tokens if self.folded_at is None else self.folded_at

    def enter_step(self, end: int, *, samples: bool, has_drafts: bool) -> None:
        """A step under construction computes its positions up to ``end``."""
        assert not self.has_drafts_in_flight
        assert not (has_drafts and self.num_in_flight), "drafts at a position that is not known"
        self.num_scheduled_tokens = end
        self.num_in_flight += 1
        self.num_sampling += samples
        self.has_drafts_in_flight = has_drafts

    def leave_step(self, end: int, *, sampled: bool) -> None:
        """That step is committed; it consumed the positions up to ``end``."""
        self.num_in_flight -= 1
        self.num_sampling -= sampled
        self.num_computed_tokens = end
        if self.has_drafts_in_flight:
            self.num_scheduled_tokens = end
            self.has_drafts_in_flight = False

    def begin_fold(self) -> int:
        """A step under construction folds its state; returns the depth: consumed and kept."""
        assert self.is_draining
        assert self.num_in_flight == 0
        self.num_in_flight = 1
        self.folded_at = min(self.num_computed_tokens, len(self.tokens))
        return self.folded_at

    def leave_fold(self) -> None:
        """That step is committed."""
        self.num_in_flight -= 1

    def preempt(self) -> None:
        """RUNNING -> PREEMPTED: nothing more is scheduled."""
        assert self.status is Status.RUNNING
        self.status = Status.PREEMPTED
        self.preempted_at = self.num_computed_tokens

    def requeue(self) -> Holding:
        """PREEMPTED -> WAITING; returns what is to be given back. No step names its row now."""
        assert self.status is Status.PREEMPTED
        self.status = Status.WAITING
        return self._let_go()

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No more is scheduled. WAITING -> FINISHED; RUNNING, PREEMPTED -> FINISHING."""
        assert self.status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED)
        is_waiting = self.status is Status.WAITING
        self.status = Status.FINISHED if is_waiting else Status.FINISHING
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def settle(self) -> Holding:
        """FINISHING -> FINISHED; returns what is to be given back. No step names its row now."""
        assert self.status is Status.FINISHING
        self.status = Status.FINISHED
        return self._let_go()

    def _let_go(self) -> Holding:
        assert self.num_in_flight == 0, "a step in flight still names the row"
        assert self.num_sampling == 0
        assert self.holding is not None
        holding, self.holding = self.holding, None
        return holding

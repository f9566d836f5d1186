"""The vocabulary shared by both planes: what a request is, what goes down, what comes up.

Owns: ``SamplingParams``, ``Request``, ``ScheduledBatch`` (control plane to data plane) and
``StepOutput`` (data plane to control plane), in one file: it is the whole contract between the
planes (the reason for its length). Integers only (numpy, no torch).
Does not know: the tree, the queue, tensors.

Invariants:
- A batch names a token by (request row, position). The data plane keeps a table of token ids per
  row; it writes each sampled token there itself, so step N+1 can be built before the token of
  step N has reached the host.
- A state is a point value: "the state at depth d" has consumed exactly tokens[0:d].
- KV slot 0 and state slot 0 are sinks: written by padding, never read for a live request.

Read next: ``scheduler/scheduler.py`` (who makes batches), ``runner/runner.py`` (who runs them).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from hyradix.errors import InvalidParameterError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]

SINK = 0
"""Slot number of the sink in every pool."""

MAX_LOGPROBS = 20
MAX_N = 128


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class MissReason(enum.StrEnum):
    """Why a request resumed from less than the KV that was there (or from nothing)."""

    NONE = "none"
    COLD = "cold"
    NEVER_PLACED = "never_placed"
    EVICTED = "evicted"
    IN_FLIGHT = "in_flight"
    BEYOND_LAST = "beyond_last"
    NO_SLOT = "no_slot"


class BoundaryKind(enum.StrEnum):
    """What a boundary of a rendered prompt is."""

    SYSTEM = "system"
    """The end of the system prompt."""
    TURN = "turn"
    """The start of a user turn."""
    LAST = "last"
    """The end of the last message, before the generation prompt."""
    MARK = "mark"
    """A position the caller marked (``cache_control``)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen. Names and defaults as vLLM's users know them.

    Raises ``InvalidParameterError`` (from ``validate``) with ``param`` set.
    """

    n: int = 1
    max_tokens: int | None = 16
    """None: up to ``max_context``."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: drawn at random when the request is accepted (and kept, also over preemption)."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """Number of top logprobs reported beside the sampled token's own; None: none at all."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form the caller used."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken."""
        return self.temperature == 0.0 or self.top_k == 1

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Check types and ranges once, at the door. Raises ``InvalidParameterError``."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except msgspec.ValidationError as error:
            name = str(error).rpartition("`$.")[2].strip("`").partition("[")[0]
            raise InvalidParameterError(f"{name}: {error}", param=name) from error
        _check_ranges(self)
        _check_stop(self)
        _check_token_ids(self, vocab_size)


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidParameterError(f"{param} {message}", param=param)


def _check_ranges(p: SamplingParams) -> None:
    finite = np.isfinite
    _require(1 <= p.n <= MAX_N, "n", f"must be between 1 and {MAX_N}, got {p.n}")
    _require(
        p.max_tokens is None or p.max_tokens >= 1,
        "max_tokens",
        f"must be at least 1, got {p.max_tokens}",
    )
    _require(p.min_tokens >= 0, "min_tokens", f"must be at least 0, got {p.min_tokens}")
    _require(
        p.max_tokens is None or p.min_tokens <= p.max_tokens,
        "min_tokens",
        f"must not exceed max_tokens ({p.max_tokens}), got {p.min_tokens}",
    )
    _require(
        bool(finite(p.temperature)) and 0 <= p.temperature <= 100,
        "temperature",
        f"must be between 0 and 100, got {p.temperature}",
    )
    _require(0 < p.top_p <= 1, "top_p", f"must be in (0, 1], got {p.top_p}")
    _require(p.top_k >= -1, "top_k", f"must be -1 (off), 0 (off) or positive, got {p.top_k}")
    _require(0 <= p.min_p <= 1, "min_p", f"must be in [0, 1], got {p.min_p}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        _require(-2 <= value <= 2, name, f"must be in [-2, 2], got {value}")
    _require(
        0.01 <= p.repetition_penalty <= 100,
        "repetition_penalty",
        f"must be between 0.01 and 100, got {p.repetition_penalty}",
    )
    _require(
        p.seed is None or -(2**63) <= p.seed < 2**63, "seed", "must fit in a signed 64-bit integer"
    )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        _require(
            value is None or 0 <= value <= MAX_LOGPROBS,
            name,
            f"must be between 0 and {MAX_LOGPROBS}, got {value}",
        )


def _check_stop(p: SamplingParams) -> None:
    stops = p.stop_strings
    _require(len(stops) <= 16, "stop", f"takes at most 16 strings, got {len(stops)}")
    _require(all(s for s in stops), "stop", "must not contain an empty string")


def _check_token_ids(p: SamplingParams, vocab_size: int | None) -> None:
    for name, ids in (
        ("stop_token_ids", p.stop_token_ids or []),
        ("logit_bias", list(p.logit_bias or {})),
    ):
        bad = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
        limit = f" (vocabulary size {vocab_size})" if vocab_size is not None else ""
        _require(not bad, name, f"names token ids outside the vocabulary{limit}: {bad[:5]}")
    for value in (p.logit_bias or {}).values():
        _require(-100 <= value <= 100, "logit_bias", f"values must be in [-100, 100], got {value}")


class Namespace(msgspec.Struct, frozen=True):
    """Whose prefixes may be shared: a structured key, compared field by field, never joined."""

    adapter: str = ""
    salt: str = ""


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """A position of the prompt at which a state checkpoint is worth having."""

    position: int
    kind: BoundaryKind


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue once (``n`` > 1 is fanned out before this point).

    ``prompt_token_ids`` is the raw little-endian int32 buffer: it crosses the process boundary
    and reaches the cache without a Python integer per token.
    """

    request_id: str
    prompt_token_ids: bytes
    sampling: SamplingParams
    seed: int
    boundaries: tuple[Boundary, ...] = ()
    namespace: Namespace = Namespace()
    pin: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids) // 4

    def prompt_array(self) -> Int32Array:
        """The prompt as a read-only ``int32[num_prompt_tokens]`` view."""
        return np.frombuffer(self.prompt_token_ids, dtype="<i4")


# ---- down: control plane -> data plane ----------------------------------------------------------


class StateOpKind(enum.IntEnum):
    """What a ``StateOp`` does to whole state slots (all tensors of the state registry)."""

    CLEAR = 0
    COPY = 1


@dataclass(frozen=True, slots=True)
class StateOp:
    """One move of a state slot, done before the forward of its step.

    Within a step all sources are read before any destination is written; no slot is both.
    ``source`` is ``SINK`` for CLEAR.
    """

    kind: StateOpKind
    destination: int
    source: int = SINK


@dataclass(frozen=True, slots=True)
class StateSave:
    """While running request row ``row``, write the state at exactly ``depth`` to ``slot``.

    start < depth <= start + num_tokens of that row in this step. At depth == start + num_tokens
    this equals a copy of the working state after the forward. Of a row with drafts: depth <=
    start + max_accepted, and nothing is written if fewer tokens than that are consumed.
    """

    row: int
    slot: int
    depth: int


@dataclass(frozen=True, slots=True)
class StateFold:
    """After the forward: bring what ``row`` has logged or held, up to ``depth``, into its state.

    ``slot``: its working state, which is exactly at ``depth`` afterwards. What the row has logged
    past ``depth`` is dropped. The row itself is in no forward of this step.
    """

    row: int
    slot: int
    depth: int


@dataclass(frozen=True, slots=True)
class RowInit:
    """A request enters request-table row ``row``; all that was known of that row is void."""

    row: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """Write ``values`` at [row, start : start + len(values)] of a per-row table."""

    row: int
    start: int
    values: Int32Array


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step does.

    Order: row_inits, token and KV updates, state_ops, forward with saves, folds. A step may have
    no rows, only folds.

    Per scheduled row (all ``[N]``; a row appears at most once):
        rows: request-table row.
        starts: first position computed in this step (= depth of the working state).
        num_tokens: how many positions; [start, start + num_tokens) are computed.
        write_from: first position whose KV may be written; KV slots of positions before it are
            shared from the tree and only read (a state is being rebuilt over them).
        state_slots: the working state, read and updated in place.
        samples: whether a token is sampled from the logits of the last position.
        max_nodes: nodes that a draft tree may have here, its root (the token at ``starts``)
            included; 1: a decode without drafts; 0: a prefill, never drafted for.
        max_accepted: positions that may be consumed at most; 1 where max_nodes <= 1.
        committed: depth that the host has committed: nothing past it may be folded away.
        is_followed: whether the proposer is told of this row; drafts need that it was in the step
            before.
        num_slots: columns of the row's part of the slot table that are its own or locked for it.

    Without drafts and log a prefill of one token and a decode step are the same. With drafts
    ``num_tokens`` is 1 (the root); how many positions were consumed comes back as
    ``StepOutput.num_tokens``. Node t of row i has the KV slot at table column starts[i] + t; after
    the forward the columns are reordered (``slot_order``), on both planes alike. No other step in
    flight names a row whose max_nodes exceeds 1.
    """

    step: int
    rows: Int32Array
    starts: Int32Array
    num_tokens: Int32Array
    write_from: Int32Array
    state_slots: Int32Array
    samples: BoolArray
    max_nodes: Int32Array
    max_accepted: Int32Array
    committed: Int32Array
    num_slots: Int32Array
    is_followed: BoolArray
    row_inits: tuple[RowInit, ...] = ()
    token_updates: tuple[RowUpdate, ...] = ()
    kv_updates: tuple[RowUpdate, ...] = ()
    state_ops: tuple[StateOp, ...] = ()
    saves: tuple[StateSave, ...] = ()
    folds: tuple[StateFold, ...] = ()
    draft_topk: int = 0
    """Children that a draft node may have in this step; 0: as configured."""

    @property
    def num_rows(self) -> int:
        """Number of scheduled rows."""
        return len(self.rows)


# ---- up: data plane -> control plane ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at P positions. ``top_*`` are ``[P, k]``, best first (k may be 0)."""

    token_ids: Int32Array
    logprobs: Float32Array
    ranks: Int32Array
    """1 = the most likely token."""
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens [start, start + P): token i given tokens[:i]; start >= 1."""

    row: int
    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced, in the order of the sampling rows of its batch.

    rows: ``int32[M]`` request rows that sampled.
    token_ids: ``int32[M, K]``, padded with -1 (K = 1 without drafts).
    num_tokens: ``int32[M]`` valid tokens per row (accepted drafts + 1) = positions consumed, for
        rows that are decodes.
    paths: ``int32[M, K]`` nodes of the draft tree that were consumed, the root (0) first, padded
        with -1.
    num_nodes: ``int32[M]`` nodes that were verified, the root included.
    is_faulty: ``bool[M]`` the row's logits were not finite; its tokens mean nothing.
    logprobs: one entry per sampling row, of all its tokens; None where not asked for.
    """

    step: int
    rows: Int32Array
    token_ids: Int32Array
    num_tokens: Int32Array
    is_faulty: BoolArray
    paths: Int32Array
    num_nodes: Int32Array
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = field(default=())


def slot_order(path: Int32Array, num_nodes: int) -> Int32Array:
    """Where the slots of a row's nodes go once ``path`` is consumed: ``int32[num_nodes]``.

    The new columns start.. are the old ones at start + slot_order: the path's first, root first,
    then the others in ascending order. No data moves, and no slot is lost.
    """
    is_other = np.ones(num_nodes, np.bool_)
    is_other[path] = False
    return np.concatenate([path, np.flatnonzero(is_other)]).astype(np.int32)


class Runner(Protocol):
    """The data plane as the engine sees it. Steps run in the order they were submitted."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Start a step. May return before it has run."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest submitted step and return what it produced."""
        ...

"""What crosses between the API server and the engine process: plain structs, msgpack on the wire.

Owns: the message types and their codecs. Does not know: sockets, HTTP, tensors.
Invariant: for each ``Submit`` exactly one ``RequestOutput`` with ``is_finished`` comes back.
Read next: ``engine/engine.py``.
"""

from __future__ import annotations

import msgspec

from hyradix.errors import HyradixError
from hyradix.request import FinishReason, MissReason, Request


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's log probability, and the best alternatives as (token id, logprob, text)."""

    token_id: int
    logprob: float
    rank: int
    text: str
    top: list[tuple[int, float, str]] = []


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one request: the tokens and the text since the last one (deltas)."""

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Whole, in the first output that has it; entry 0 is None."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence."""
    error: str | None = None
    error_code: str | None = None
    """``HyradixError.code`` of a refusal or failure (finish_reason ERROR)."""
    error_status: int = 500
    error_param: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_kv_tokens: int = 0
    num_output_tokens: int = 0
    miss_reason: MissReason = MissReason.NONE

    @property
    def is_finished(self) -> bool:
        """Whether this is the last output of its request."""
        return self.finish_reason is not None


def refusal_of(request: Request, error: HyradixError) -> RequestOutput:
    """The final output of a request that ``error`` kept out."""
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=error.message,
        error_code=error.code,
        error_status=error.status,
        error_param=error.param,
        num_prompt_tokens=request.num_prompt_tokens,
    )


class PoolStats(msgspec.Struct, kw_only=True):
    """Slots of one pool: free + cached + held = total."""

    free: int
    cached: int
    held: int
    total: int


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of counters (monotonic since start) and gauges."""

    num_running: int
    num_waiting: int
    kv: PoolStats
    state: PoolStats
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens run through the model in prefill."""
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_draft_rounds: int = 0
    """Rounds of one request in which drafts were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted; 1 + accepted / rounds is the accept length."""
    num_evicted_states: int = 0
    num_evicted_kv: int = 0
    num_skipped_saves: int = 0
    """Checkpoints not kept because no state slot could be had."""
    num_steps: int = 0
    miss_reasons: dict[str, int] = {}
    finish_reasons: dict[str, int] = {}


class NodeView(msgspec.Struct, kw_only=True):
    """One node of the radix tree. ``parent`` is None right under the root."""

    id: int
    parent: int | None
    depth: int
    num_tokens: int
    has_state: bool
    kv_lock: int
    state_lock: int
    last_use: int


class NamespaceView(msgspec.Struct, kw_only=True):
    """One namespace's tree, parents before children. ``id``: its adapter and salt."""

    id: tuple[str, str]
    nodes: list[NodeView]


class CacheView(msgspec.Struct, kw_only=True):
    """The whole cache at one moment."""

    namespaces: list[NamespaceView]
    pools: dict[str, PoolStats]


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the engine tells when it is ready."""

    model_name: str
    model_dir: str
    """Where the tokenizer and chat template were found (resolved, absolute); with a checkpoint,
    its weights too."""
    architecture: str
    vocab_size: int
    max_context: int
    max_requests: int
    num_kv_slots: int
    num_states: int
    kv_pool_bytes: int
    state_pool_bytes: int
    weight_bytes: int
    dtype: str
    device: str
    load_s: float = 0.0
    drafts: str = ""
    """What was decided about drafts and the state log, in words; empty: neither."""
    draft_bytes: int = 0


class Submit(msgspec.Struct, tag=True):
    """Server to engine: run this."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Server to engine: the client of these is gone. Unknown ids are ignored."""

    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True):
    """Server to engine: answer with ``Stats``."""

    call_id: int


class GetCache(msgspec.Struct, tag=True):
    """Server to engine: answer with ``Cache``."""

    call_id: int


class Flush(msgspec.Struct, tag=True):
    """Server to engine: forget every unpinned prefix; answer with ``Flushed``."""

    call_id: int


class Shutdown(msgspec.Struct, tag=True):
    """Server to engine: abort everything and exit."""


class Ready(msgspec.Struct, tag=True):
    """Engine to server, once, first (after loading and warm-up)."""

    info: EngineInfo


class Progress(msgspec.Struct, tag=True):
    """Engine to server: while loading (stage, done, total)."""

    stage: str
    done: int
    total: int


class Failed(msgspec.Struct, tag=True):
    """Engine to server: start-up failed or the engine cannot go on; the process exits."""

    message: str
    code: str


class Outputs(msgspec.Struct, tag=True):
    """Engine to server: what one step brought."""

    outputs: list[RequestOutput]


class Stats(msgspec.Struct, tag=True):
    """Engine to server: the answer to ``GetStats``."""

    call_id: int
    stats: EngineStats


class Cache(msgspec.Struct, tag=True):
    """Engine to server: the answer to ``GetCache``."""

    call_id: int
    view: CacheView


class Flushed(msgspec.Struct, tag=True):
    """Engine to server: the answer to ``Flush``; False: requests run or wait, nothing was done."""

    call_id: int
    is_done: bool


ToEngine = Submit | Abort | GetStats | GetCache | Flush | Shutdown
FromEngine = Ready | Progress | Failed | Outputs | Stats | Cache | Flushed

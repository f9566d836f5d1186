"""Settings: what a user may choose (``Settings``), and what follows from it (``EngineConfig``).

Owns: every option's name, default and range, and the arithmetic that divides memory: one file, so
that whoever asks what an option does to the engine finds it here (the reason for its length).
Does not know: how models are loaded or memory is allocated; it is told facts and computes.
Invariants: both objects are frozen; ``resolve`` decides everything, and is asked again only with
what was measured on a GPU; "auto" and None are gone after it;
computed bytes equal allocated bytes (a test of the runner's pools asserts it).
Read next: ``request.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

import msgspec

from hyradix.device_bytes import ForwardShape, StepSize, beside_pools
from hyradix.errors import ConfigError
from hyradix.spec_config import (
    DECODE_LOG,
    PROPOSERS,
    ProposerName,
    SpecConfig,
    draft_shape,
    log_rows,
    refused,
)
from hyradix.state_bytes import MODES, RecurrentShape, SpecShape, spec_bytes

MIB = 1 << 20
GPU_PREFILL = 8192
"""Prompt tokens of one step on a GPU, unless told."""
MAX_THREADS = 512
"""More than any machine this runs on has; a million threads crash the runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What resolving needs to know of a model; derived from its config.json alone."""

    name: str
    architecture: str
    vocab_size: int
    max_position: int
    """Longest context the checkpoint was made for."""
    kv_bytes_per_slot: int
    """K and V of one token, all attention layers, in the KV dtype."""
    state_bytes_per_slot: int
    """Recurrent state and conv window of one sequence, all recurrent layers."""
    eos_token_ids: tuple[int, ...]
    weight_bytes: int = 0
    recurrent: RecurrentShape | None = None
    """The recurrent layers; needed where drafts or a log are asked for, and on a GPU."""
    forward: ForwardShape | None = None
    """What a token is inside a forward; needed on a GPU."""
    hidden_bytes: int = 0
    """A last hidden state, which draft heads need beside each recurrent state."""
    draft_kv_bytes: int = 0
    """K and V of one token in the draft layer of ``mtp``."""
    proposers: tuple[ProposerName, ...] = ("ngram",)
    """Those that need no weights, or whose weights the checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What resolving needs to know of a device."""

    kind: str
    """"cpu" or "cuda"."""
    free_bytes: int
    """On a GPU: what this engine may still allocate, by ``memory_fraction``."""
    num_threads: int = 1
    name: str = ""
    total_bytes: int = 0
    peak_bytes: int | None = None
    """Measured on a GPU once weights and scratch are loaded: activations of the largest step. None:
    nothing is loaded yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user may set; every name is also a ``hyradix serve`` option."""

    model: str = "demo"
    random_weights: str | None = None
    """A config.json (or its directory) to make a model of without weights, in place of one."""
    served_model_name: str | None = None
    dtype: str = "auto"
    """auto (the checkpoint's; float32 on the CPU), float32 or bfloat16."""
    device: str = "auto"
    num_threads: int | None = None
    max_requests: int | None = None
    """Requests that run at the same time (rows of the request table)."""
    max_context: int | None = None
    """Tokens of prompt and reply together."""
    kv_slots: int | None = None
    states: int | None = None
    memory_bytes: int | None = None
    """Bytes for both pools together; default: a part of what is free."""
    memory_fraction: float = 0.92
    """Of a GPU's memory: what the engine may use for everything."""
    tokens_per_state: int = 1024
    max_prefill_tokens: int | None = None
    """Prompt tokens computed in one step; 0 = unlimited."""
    prefix_cache: bool = True
    policy: str = "lru"
    min_gain: int = 32
    """A checkpoint that saves fewer tokens than this is kept only in a slot nobody needs."""
    max_checkpoints: int = 16
    """Checkpoints one request may place while prefilling."""
    track_interval: int = 256
    """Decode tokens between periodic saves of a running request's state; 0 = never."""
    overlap: bool | None = None
    """Schedule step N+1 while step N runs; default: on a GPU, where nothing is drafted."""
    order: str = "fcfs"
    """How the queue is ordered: fcfs, or longest_prefix (cached) first."""
    force_preempt_every: int = 0
    """For tests: preempt the youngest request every N steps; 0 = never."""
    preempt_donate: str = "always"
    """Whether a preempted request leaves its working state in the cache (else its last track)."""
    max_queue: int = 1024
    check_invariants: bool = False
    warmup_prompts_file: str | None = None
    warmups: str | None = None
    """``kda_cache``: another name for running ``warmup_prompts_file``, which it needs."""
    pin: bool = False
    """Never evict the prefixes of the warm-up prompts."""
    seed: int | None = None
    spec: str = "off"
    """Who proposes draft tokens: off, ngram, mtp or frozen_kv_mtp."""
    spec_state: str = "auto"
    """How recurrent state is kept under drafts: auto, snapshot, replay or log."""
    spec_topk: int | None = None
    """Children of a draft node; without topk, steps and nodes the shape is chosen every round."""
    spec_steps: int | None = None
    spec_nodes: int | None = None
    """Nodes verified in a round, the root included."""
    decode_log: int | None = None
    """Rows of the state log; 0: decode in place."""

    @classmethod
    def from_options(cls, **options: object) -> Settings:
        """Build from keyword options. Raises ``ConfigError`` for an unknown name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option(s): {', '.join(unknown)}", param=unknown[0])
        if isinstance(options.get("model"), os.PathLike):
            options["model"] = os.fspath(options["model"])  # type: ignore[call-overload]
        try:
            return msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            name = str(error).rpartition("`$.")[2].strip("`")
            raise ConfigError(f"--{name.replace('_', '-')}: {error}", param=name) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything decided. See ``Settings`` for what each number means."""

    model_name: str
    dtype: str
    device: str
    num_threads: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_requests: int
    max_context: int
    num_kv_slots: int
    num_states: int
    kv_bytes_per_slot: int
    state_bytes_per_slot: int
    max_prefill_tokens: int
    """0 = unlimited."""
    prefix_cache: bool
    policy: str
    min_gain: int
    max_checkpoints: int
    track_interval: int
    overlap: bool
    order: str
    force_preempt_every: int
    preempt_donate: str
    max_queue: int
    check_invariants: bool
    spec: SpecConfig | None
    """None: no drafts."""
    num_log_rows: int
    """R: rows of the state log of each request; 0: there is none."""
    draft_bytes: int
    """Buffers of all requests beside the pools, for drafts and the log."""

    @property
    def defers_state(self) -> bool:
        """Whether a decoding row's working state may lag behind what it has consumed.

        Then it needs a ``StateFold`` before it can be donated.
        """
        return self.num_log_rows > 0 or (self.spec is not None and self.spec.state != "snapshot")

    @property
    def table_width(self) -> int:
        """Columns of the request table: draft nodes may stand past the longest context."""
        return self.max_context + (self.spec.num_slots if self.spec is not None else 0)

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool, its sink included."""
        return (self.num_kv_slots + 1) * self.kv_bytes_per_slot

    @property
    def state_pool_bytes(self) -> int:
        """Bytes of the state pool, its sink included."""
        return (self.num_states + 1) * self.state_bytes_per_slot


def resolve(settings: Settings, model: ModelFacts, device: DeviceFacts) -> EngineConfig:
    """Decide everything that was left open. Raises ``ConfigError`` naming the setting at fault."""
    check_settings(settings)
    max_requests = settings.max_requests or (32 if device.kind == "cpu" else 256)
    max_context = context_limit(settings.max_context, model.max_position)
    if max_context < 2:
        raise ConfigError(
            f"--max-context {max_context} has no room for a prompt and a reply: at least 2",
            param="max_context",
        )
    spec = _spec(settings, model, device)
    overlap = settings.overlap
    if overlap is None:
        overlap = device.kind == "cuda" and spec is None
    num_log_rows = _num_log_rows(settings, device, spec, overlap=overlap)
    model = _with_drafts(model, spec)
    draft_bytes = _draft_bytes(model, spec, num_log_rows, max_requests)
    chunk = _max_prefill(settings, device)
    step = StepSize(
        max_requests=max_requests,
        max_tokens=chunk + max_requests,
        max_context=max_context,
        table_width=max_context + (spec.num_slots if spec is not None else 0),
    )
    num_kv_slots, num_states = _divide(settings, model, device, step, draft_bytes)
    if num_states < max_requests:
        raise ConfigError(
            f"--states {num_states} is less than --max-requests {max_requests}: every running "
            "request needs one",
            param="states",
        )
    return EngineConfig(
        model_name=settings.served_model_name or model.name,
        dtype=_dtype(settings, device),
        device=device.kind,
        num_threads=settings.num_threads or device.num_threads,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(i for i in model.eos_token_ids if i < model.vocab_size),
        max_requests=max_requests,
        max_context=max_context,
        num_kv_slots=num_kv_slots,
        num_states=num_states,
        kv_bytes_per_slot=model.kv_bytes_per_slot,
        state_bytes_per_slot=model.state_bytes_per_slot,
        max_prefill_tokens=chunk,
        prefix_cache=settings.prefix_cache,
        policy=settings.policy,
        min_gain=settings.min_gain,
        max_checkpoints=settings.max_checkpoints,
        track_interval=settings.track_interval,
        overlap=overlap,
        order=settings.order,
        force_preempt_every=settings.force_preempt_every,
        preempt_donate=settings.preempt_donate,
        max_queue=settings.max_queue,
        check_invariants=settings.check_invariants,
        spec=spec,
        num_log_rows=num_log_rows,
        draft_bytes=draft_bytes,
    )


AUTOMATIC_SHAPES = {
    "cpu": {"ngram": (1, 7, 8), "mtp": (1, 5, 6), "frozen_kv_mtp": (1, 5, 6)},
    "cuda": {"ngram": (4, 7, 32), "mtp": (4, 5, 32), "frozen_kv_mtp": (4, 5, 32)},
}
"""topk, steps and nodes of the largest tree that the automatic choice may take. On a CPU chains are
faster than trees of 8 nodes, whoever proposes and whatever the prompts are (see
``benchmarks/spec_decode.py``); with few nodes it can afford ``snapshot``, under which a request
without drafts decodes as if there were none."""


def _with_drafts(model: ModelFacts, spec: SpecConfig | None) -> ModelFacts:
    """The same model with what a draft head adds to every slot of the pools."""
    if spec is None or spec.proposer == "ngram":
        return model
    layer = model.draft_kv_bytes if spec.proposer == "mtp" else 0
    return replace(
        model,
        kv_bytes_per_slot=model.kv_bytes_per_slot + layer,
        state_bytes_per_slot=model.state_bytes_per_slot + model.hidden_bytes,
    )


def _draft_bytes(
    model: ModelFacts, spec: SpecConfig | None, num_log_rows: int, max_requests: int
) -> int:
    """Bytes of ``state_bytes.buffers`` for what was decided."""
    if spec is None and not num_log_rows:
        return 0
    if model.recurrent is None:  # a fake model: its buffers cost nothing
        return 0
    if spec is None:
        plain = SpecShape(num_requests=max_requests, num_nodes=1, num_log_rows=num_log_rows)
        return spec_bytes("log", model.recurrent, plain).peak
    has_hidden = spec.proposer != "ngram"
    recurrent = model.recurrent
    if has_hidden:
        recurrent = replace(recurrent, hidden_size=model.hidden_bytes // recurrent.hidden_bytes)
    shape = spec.shape.spec_shape(max_requests, num_log_rows)
    return spec_bytes(spec.state, recurrent, shape).peak


def _spec(settings: Settings, model: ModelFacts, device: DeviceFacts) -> SpecConfig | None:
    """What was asked for about drafts, decided."""
    proposer = next((name for name in PROPOSERS if name == settings.spec), None)
    given = (settings.spec_topk, settings.spec_steps, settings.spec_nodes)
    shape = draft_shape(*given)
    if proposer is None:
        if shape is not None or settings.spec_state != "auto":
            name = "spec_state" if shape is None else "spec_steps"
            value = getattr(settings, name)
            raise refused("spec", "off", f"--{name.replace('_', '-')} {value} needs drafts", "mtp")
        return None
    if proposer not in model.proposers:
        reason = f"{model.name} has no weights for it"
        raise refused("spec", proposer, reason, model.proposers[-1])
    is_automatic = shape is None
    shape = shape or draft_shape(*AUTOMATIC_SHAPES[device.kind][proposer])
    assert shape is not None
    mode = next((mode for mode in MODES if mode == settings.spec_state), None)
    if mode is None:  # auto: a short chain's states are few; a tree's would be many
        is_small = shape.nodes <= (8 if device.kind == "cpu" else 5 * shape.is_chain)
        mode = "snapshot" if is_small else "log"
    return SpecConfig(proposer=proposer, state=mode, shape=shape, is_automatic=is_automatic)


def _max_prefill(settings: Settings, device: DeviceFacts) -> int:
    """Prompt tokens of one step. A GPU's scratch is allocated for them at start."""
    chunk = settings.max_prefill_tokens
    if chunk is None:
        return 2048 if device.kind == "cpu" else GPU_PREFILL
    if chunk == 0 and device.kind == "cuda":
        reason = "a GPU's memory is set aside at start for a number of tokens"
        raise refused("max_prefill_tokens", chunk, reason, GPU_PREFILL)
    return chunk


def _num_log_rows(
    settings: Settings, device: DeviceFacts, spec: SpecConfig | None, *, overlap: bool
) -> int:
    """R. Decode in place on the CPU, through the log on a GPU, unless told."""
    rounds = 2 if overlap else 1
    wanted = settings.decode_log
    if spec is not None:
        if spec.state == "log":
            return log_rows(wanted, spec.shape, rounds=rounds)
        if wanted:
            reason = f"--spec-state {spec.state} keeps no log"
            raise refused("decode_log", wanted, reason, 0)
        return 0
    if wanted is None:
        return 0 if device.kind == "cpu" else DECODE_LOG
    if wanted and wanted < rounds:
        reason = "with overlap the log must hold the tokens of two steps"
        raise refused("decode_log", wanted, reason, rounds)
    return wanted


def _dtype(settings: Settings, device: DeviceFacts) -> str:
    return dtype_on(device.kind, settings.dtype)


def dtype_on(kind: str, wanted: str) -> str:
    """The type of weights on a kind of device; ``auto`` decided."""
    if wanted != "auto":
        return wanted
    return "float32" if kind == "cpu" else "bfloat16"


def context_limit(wanted: int | None, max_position: int) -> int:
    """``max_context``: what was asked for, else the model's, within bounds."""
    return min(wanted or min(max_position, 32_768), 1 << 24)


def _divide(
    settings: Settings,
    model: ModelFacts,
    device: DeviceFacts,
    step: StepSize,
    draft_bytes: int,
) -> tuple[int, int]:
    if settings.kv_slots is not None and settings.states is not None:
        return settings.kv_slots, settings.states
    budget = settings.memory_bytes
    if budget is None and device.kind == "cpu":
        budget = min(int(device.free_bytes * 0.25), 4096 * MIB)
    if budget is None:
        budget = _gpu_budget(settings, model, device, step)
    max_requests, state_bytes = step.max_requests, model.state_bytes_per_slot
    num_kv, num_states = divide_pools(
        budget,
        max_requests,
        kv_bytes=model.kv_bytes_per_slot,
        state_bytes=state_bytes,
        tokens_per_state=settings.tokens_per_state,
        draft_bytes=draft_bytes,
        kv_slots=settings.kv_slots,
        states=settings.states,
    )
    if num_kv < 1:
        name = "memory_bytes" if device.kind == "cpu" else "memory_fraction"
        logs = f" with {draft_bytes / MIB:.0f} MiB of logs and drafts" if draft_bytes else ""
        raise ConfigError(
            f"{budget / MIB:.0f} MiB do not hold {max_requests} working states of "
            f"{state_bytes / MIB:.1f} MiB{logs} and any KV; lower --max-requests or raise "
            f"--{name.replace('_', '-')}",
            param=name,
        )
    return num_kv, num_states


def _gpu_budget(settings: Settings, model: ModelFacts, device: DeviceFacts, step: StepSize) -> int:
    """Bytes left for pools and logs. Raises ``ConfigError`` where there are none."""
    assert model.forward is not None, "a model for a GPU says what a token is in a forward"
    assert model.recurrent is not None
    beside = beside_pools(
        model.forward,
        model.recurrent,
        step,
        weight_bytes=model.weight_bytes,
        element_bytes={"float32": 4, "bfloat16": 2}[_dtype(settings, device)],
    )
    needed = beside.total
    if device.peak_bytes is not None:
        needed = beside.still_to_come(device.peak_bytes)
    if needed < device.free_bytes:
        return device.free_bytes - needed
    parts = f"{(needed - beside.weights) / MIB:.0f} MiB to compute"
    if device.peak_bytes is None:
        parts = f"{beside.weights / MIB:.0f} MiB of weights and {parts}"
    raise ConfigError(
        f"{parts} do not fit into the {device.free_bytes / MIB:.0f} MiB that may be used of "
        f"{device.name or device.kind} ({device.total_bytes / MIB:.0f} MiB); raise "
        "--memory-fraction, or lower --max-prefill-tokens or --max-requests",
        param="memory_fraction",
    )


def divide_pools(
    budget: int,
    max_requests: int,
    *,
    kv_bytes: int,
    state_bytes: int,
    tokens_per_state: int,
    draft_bytes: int = 0,
    kv_slots: int | None = None,
    states: int | None = None,
) -> tuple[int, int]:
    """(KV slots, state slots) of a byte budget; under one KV slot: it does not fit.

    First the working states and ``draft_bytes`` (of all requests), then of the rest one checkpoint
    per tokens_per_state KV slots, unless ``kv_slots`` or ``states`` is given.
    bytes = draft_bytes + (num_kv + 1) * kv_bytes + (num_states + 1) * state_bytes, sinks included.
    """
    rest = budget - draft_bytes - kv_bytes - state_bytes * (1 + max_requests)
    if states is not None:
        rest -= state_bytes * (states - max_requests)
        return rest // max(kv_bytes, 1), states
    if kv_slots is not None:
        rest -= kv_bytes * kv_slots
        return kv_slots, max_requests + max(rest // max(state_bytes, 1), 0)
    num_checkpoints = max(rest // max(tokens_per_state * kv_bytes + state_bytes, 1), 0)
    rest -= num_checkpoints * state_bytes
    return rest // max(kv_bytes, 1), max_requests + num_checkpoints


def check_settings(s: Settings) -> None:
    """Raise ``ConfigError`` for a value out of its range; needs no facts."""
    positive = ("max_requests", "max_context", "kv_slots", "states", "num_threads", "memory_bytes")
    for name in positive:
        value = getattr(s, name)
        if value is not None and value < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be positive, got {value}", param=name
            )
    for name in (
        "max_prefill_tokens",
        "min_gain",
        "max_checkpoints",
        "track_interval",
        "force_preempt_every",
        "decode_log",
    ):
        value = getattr(s, name)
        if value is not None and value < 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} must not be negative, got {value}", param=name
            )
    choices = {
        "dtype": ("auto", "float32", "bfloat16"),
        "policy": ("lru",),
        "order": ("fcfs", "longest_prefix"),
        "preempt_donate": ("always", "never"),
        "device": ("auto", "cpu", "cuda"),
        "spec": ("off", *PROPOSERS),
        "spec_state": ("auto", *MODES),
    }
    for name, allowed in choices.items():
        if getattr(s, name) not in allowed:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be one of {', '.join(allowed)}, "
                f"got {getattr(s, name)!r}",
                param=name,
            )
    if s.warmups not in (None, "kda_cache"):
        raise ConfigError(f"--warmups must be kda_cache, got {s.warmups!r}", param="warmups")
    if s.warmup_prompts_file is None and (s.warmups or s.pin):
        raise ConfigError("--warmups and --pin need --warmup-prompts-file", param="warmups")
    if s.num_threads is not None and s.num_threads > MAX_THREADS:
        raise ConfigError(
            f"--num-threads must be at most {MAX_THREADS}, got {s.num_threads}", param="num_threads"
        )
    if not 0.05 <= s.memory_fraction <= 1:
        raise ConfigError(
            f"--memory-fraction must be between 0.05 and 1, got {s.memory_fraction}",
            param="memory_fraction",
        )
    if s.tokens_per_state < 1 or s.max_queue < 1:
        raise ConfigError("--tokens-per-state and --max-queue must be positive")

"""Settings: what a user may choose (``Settings``), and what follows from it (``EngineConfig``).

Owns: every option's name, default and range, and the arithmetic that divides memory.
Does not know: how models are loaded or memory is allocated; it is told facts and computes.
Invariants: both objects are frozen; ``resolve`` runs once; "auto" and None are gone after it;
computed bytes equal allocated bytes (a test of the runner's pools asserts it).
Read next: ``request.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import msgspec

from hyradix.errors import ConfigError

MIB = 1 << 20
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What resolving needs to know of a device."""

    kind: str
    """"cpu" or "cuda"."""
    free_bytes: int
    num_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user may set; every name is also a ``hyradix serve`` option."""

    model: str = "demo"
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
    overlap: bool = False
    """Schedule step N+1 while step N runs."""
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
    num_kv_slots, num_states = _divide(settings, model, device, max_requests, max_context)
    if num_states < max_requests:
        raise ConfigError(
            f"--states {num_states} is less than --max-requests {max_requests}: every running "
            "request needs one",
            param="states",
        )
    chunk = settings.max_prefill_tokens
    return EngineConfig(
        model_name=settings.served_model_name or model.name,
        dtype=_dtype(settings, device),
        device=device.kind,
        num_threads=settings.num_threads or device.num_threads,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_requests=max_requests,
        max_context=max_context,
        num_kv_slots=num_kv_slots,
        num_states=num_states,
        kv_bytes_per_slot=model.kv_bytes_per_slot,
        state_bytes_per_slot=model.state_bytes_per_slot,
        max_prefill_tokens=(2048 if device.kind == "cpu" else 8192) if chunk is None else chunk,
        prefix_cache=settings.prefix_cache,
        policy=settings.policy,
        min_gain=settings.min_gain,
        max_checkpoints=settings.max_checkpoints,
        track_interval=settings.track_interval,
        overlap=settings.overlap,
        order=settings.order,
        force_preempt_every=settings.force_preempt_every,
        preempt_donate=settings.preempt_donate,
        max_queue=settings.max_queue,
        check_invariants=settings.check_invariants,
    )


def _dtype(settings: Settings, device: DeviceFacts) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device.kind == "cpu" else "bfloat16"


def context_limit(wanted: int | None, max_position: int) -> int:
    """``max_context``: what was asked for, else the model's, within bounds."""
    return min(wanted or min(max_position, 32_768), 1 << 24)


def _divide(
    settings: Settings,
    model: ModelFacts,
    device: DeviceFacts,
    max_requests: int,
    max_context: int,
) -> tuple[int, int]:
    if settings.kv_slots is not None and settings.states is not None:
        return settings.kv_slots, settings.states
    budget = settings.memory_bytes
    if budget is None:
        budget = int(device.free_bytes * (0.25 if device.kind == "cpu" else 0.85))
        if device.kind == "cpu":
            budget = min(budget, 4096 * MIB)
    state_bytes = model.state_bytes_per_slot
    num_kv, num_states = divide_pools(
        budget,
        max_requests,
        kv_bytes=model.kv_bytes_per_slot,
        state_bytes=state_bytes,
        tokens_per_state=settings.tokens_per_state,
        kv_slots=settings.kv_slots,
        states=settings.states,
    )
    if num_kv < 1:
        raise ConfigError(
            f"{budget / MIB:.0f} MiB do not hold {max_requests} working states of "
            f"{state_bytes / MIB:.1f} MiB and any KV; lower --max-requests or raise --memory-bytes",
            param="memory_bytes",
        )
    return num_kv, num_states


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
    if s.tokens_per_state < 1 or s.max_queue < 1:
        raise ConfigError("--tokens-per-state and --max-queue must be positive")

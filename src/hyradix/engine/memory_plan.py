"""What fits into a budget of bytes, for each way of keeping recurrent state under drafts.

From config.json alone: no weights, no torch. Adds up; the counts themselves live in
``state_bytes`` (buffers), ``models/config.py`` (slots) and ``config.divide_pools`` (the division).

Owns: the rows of the plan, and which combinations of draft options are possible.
Does not know: the command line, devices.
Read next: ``state_bytes.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyradix.config import Settings, context_limit, divide_pools
from hyradix.engine.demo import DEMO, demo_directory
from hyradix.errors import ConfigError, ModelLoadError
from hyradix.models.config import CacheConfig, RawConfig
from hyradix.models.registry import find_family
from hyradix.state_bytes import (
    MODES,
    RecurrentShape,
    SpecBytes,
    SpecShape,
    SpecStateMode,
    spec_bytes,
)
from hyradix.text.model_files import read_json

_DEFAULTS = Settings()
PLAIN = "plain"
"""The one row of a plan without drafts."""
DECODE_LOG = 16
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """``--spec-topk``, ``-steps``, ``-nodes`` (T, with the root) and ``--decode-log`` (R)."""

    topk: int
    steps: int
    nodes: int
    decode_log: int

    @property
    def is_chain(self) -> bool:
        """No two nodes share a parent."""
        return self.topk == 1

    @property
    def beam_nodes(self) -> int:
        """Nodes that a beam can fill: topk children of the root, then topk^2 candidates a step."""
        return 1 + self.topk + (self.steps - 1) * self.topk**2

    def shape(self, num_requests: int) -> SpecShape:
        """For ``state_bytes``."""
        return SpecShape(
            num_requests=num_requests,
            num_nodes=self.nodes,
            num_log_rows=self.decode_log,
            max_accepted=self.steps + 1,
            is_chain=self.is_chain,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned for. ``drafts`` None: plain serving, with a log of ``decode_log`` rows."""

    budget: int
    num_requests: int
    drafts: DraftOptions | None = None
    decode_log: int = 0
    max_context: int | None = None
    tokens_per_state: int = _DEFAULTS.tokens_per_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One mode. Bytes are of the buffers beside the pools, for the given number of requests.

    num_states: cached ones, the working states apart. They and ``num_kv_slots`` are 0 when the
    requests do not fit. max_requests: the most that leave one ``max_context`` of KV.
    """

    mode: str
    resident_bytes: int
    peak_bytes: int
    written_bytes: int
    max_requests: int
    num_states: int
    num_kv_slots: int

    @property
    def is_fitting(self) -> bool:
        """Whether the given number of requests runs at all."""
        return self.num_kv_slots > 0

    def as_json(self) -> dict[str, int]:
        """The names that ``--json`` writes."""
        return {
            "resident_bytes": self.resident_bytes,
            "peak_bytes": self.peak_bytes,
            "written_bytes_per_verify": self.written_bytes,
            "requests": self.max_requests,
            "states": self.num_states,
            "kv_slots": self.num_kv_slots,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows, and the sizes they rest on."""

    model: CacheConfig
    dtype: str
    kv_bytes: int
    """Of one KV slot."""
    state_bytes: int
    """Of one state slot."""
    max_context: int
    rows: tuple[PlanRow, ...]

    def as_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """What ``--json`` writes."""
        return {"modes": {row.mode: row.as_json() for row in self.rows}}


def read_config(model: str) -> RawConfig:
    """config.json of ``demo``, of a directory, or the file itself. Raises ``ModelLoadError``."""
    path = demo_directory() if model == DEMO else Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
        if not path.exists():
            raise ModelLoadError(f"{path.parent} has no {path.name}")
    elif path.suffix != ".json" or not path.exists():
        raise ModelLoadError(
            f"{model} is neither a directory with a config.json nor a .json file; nothing is "
            "downloaded for a plan"
        )
    return read_json(path)


def pick_dtype(raw: RawConfig, wanted: str) -> str:
    """Of KV and conv columns. auto: float32 where the checkpoint is, else bfloat16."""
    if wanted == "auto":
        text = raw.get("text_config", raw)
        declared = text.get("dtype", text.get("torch_dtype"))
        return "float32" if declared == "float32" else "bfloat16"
    if wanted not in ELEMENT_BYTES:
        raise ConfigError(
            f"--dtype must be one of auto, {', '.join(ELEMENT_BYTES)}, got {wanted!r}",
            param="dtype",
        )
    return wanted


def draft_options(
    topk: int | None, steps: int | None, nodes: int | None, decode_log: int | None
) -> DraftOptions | None:
    """Defaults filled in; None when nothing about drafts is given.

    topk: 1. nodes: all that topk and steps can fill. decode_log: 16, or what one round can accept.
    Raises ``ConfigError`` for a combination that cannot be, with the nearest one that can.
    """
    if topk is None and steps is None and nodes is None:
        return None
    if steps is None:
        raise ConfigError("drafts need --spec-steps, how deep they are", param="spec_steps")
    topk = 1 if topk is None else topk
    for name, value in (("topk", topk), ("steps", steps)):
        if value < 1:
            raise _refused(f"spec_{name}", value, "drafts need at least 1", 1)
    full = sum(topk**depth for depth in range(min(steps, 64) + 1)) if topk > 1 else steps + 1
    deepest = steps + 1
    if decode_log is None:
        decode_log = max(DECODE_LOG, deepest)
    drafts = DraftOptions(topk=topk, steps=steps, nodes=deepest, decode_log=decode_log)
    nodes = drafts.beam_nodes if nodes is None else nodes
    if nodes < deepest:
        reason = f"{steps} steps below the root are {deepest} nodes"
        raise _refused("spec_nodes", nodes, reason, deepest)
    if nodes > full:
        reason = f"--spec-topk {topk} and --spec-steps {steps} give at most {full} nodes"
        raise _refused("spec_nodes", nodes, reason, full)
    if decode_log < deepest:
        reason = f"the log must hold the {deepest} tokens that one round can accept"
        raise _refused("decode_log", decode_log, reason, deepest)
    return DraftOptions(topk=topk, steps=steps, nodes=nodes, decode_log=decode_log)


def _refused(name: str, value: int, reason: str, nearest: int) -> ConfigError:
    option = f"--{name.replace('_', '-')}"
    return ConfigError(
        f"{option} {value} is impossible: {reason}; the nearest valid choice is {option} {nearest}",
        param=name,
    )


def make_plan(raw: RawConfig, options: PlanOptions, *, dtype: str = "auto") -> Plan:
    """The plan. Raises ``ModelLoadError`` (unknown architecture) or ``ConfigError``."""
    _check(options)
    model = find_family(raw, for_planning=True).parse_cache(raw)
    dtype = pick_dtype(raw, dtype)
    shape = model.recurrent_shape(ELEMENT_BYTES[dtype])
    kv_bytes = model.kv_bytes_per_slot(ELEMENT_BYTES[dtype])
    max_context = context_limit(options.max_context, model.max_position)
    modes = MODES if options.drafts is not None else (PLAIN,)
    return Plan(
        model=model,
        dtype=dtype,
        kv_bytes=kv_bytes,
        state_bytes=shape.slot_bytes,
        max_context=max_context,
        rows=tuple(_row(mode, shape, options, kv_bytes, max_context) for mode in modes),
    )


def _check(options: PlanOptions) -> None:
    given = {
        "budget": options.budget,
        "requests": options.num_requests,
        "max_context": options.max_context,
        "tokens_per_state": options.tokens_per_state,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise _refused(name, value, "it must be positive", 1)
    if options.decode_log < 0:
        raise _refused("decode_log", options.decode_log, "it must not be negative", 0)


def mode_bytes(mode: str, shape: RecurrentShape, options: PlanOptions, n: int) -> SpecBytes:
    """Of the buffers beside the pools, for n requests.

    ``plain``: none when decode is in place, where a step writes each working state whole; with a
    log, those of a tree that is its root alone.
    """
    if options.drafts is not None:
        spec_mode: SpecStateMode = next(known for known in MODES if known == mode)
        return spec_bytes(spec_mode, shape, options.drafts.shape(n))
    if options.decode_log:
        spec = SpecShape(num_requests=n, num_nodes=1, num_log_rows=options.decode_log)
        return spec_bytes("log", shape, spec)
    return SpecBytes(resident=0, peak=0, written=n * shape.slot_bytes)


def _row(
    mode: str, shape: RecurrentShape, options: PlanOptions, kv_bytes: int, max_context: int
) -> PlanRow:
    def divide(n: int) -> tuple[int, int]:
        return divide_pools(
            options.budget,
            n,
            kv_bytes=kv_bytes,
            state_bytes=shape.slot_bytes,
            tokens_per_state=options.tokens_per_state,
            draft_bytes=mode_bytes(mode, shape, options, n).peak,
        )

    num_requests = options.num_requests
    needed = mode_bytes(mode, shape, options, num_requests)
    num_kv, num_states = divide(num_requests)
    # Each request costs the same, so this is the most that could leave the KV without any
    # checkpoint; the division takes checkpoints too, so go down from there.
    no_requests = mode_bytes(mode, shape, options, 0).peak
    each = mode_bytes(mode, shape, options, 1).peak - no_requests + shape.slot_bytes
    spare = options.budget - no_requests - shape.slot_bytes - (1 + max_context) * kv_bytes
    most = max(spare // max(each, 1), 0)
    while most and divide(most)[0] < max_context:
        most -= 1
    return PlanRow(
        mode=mode,
        resident_bytes=needed.resident,
        peak_bytes=needed.peak,
        written_bytes=needed.written,
        max_requests=most,
        num_states=num_states - num_requests if num_kv >= 1 else 0,
        num_kv_slots=max(num_kv, 0),
    )

"""What fits into a budget of bytes, for each way of keeping recurrent state under drafts.

From config.json alone: no weights, no torch. Adds up; the counts themselves live in
``state_bytes`` (buffers), ``models/config.py`` (slots) and ``config.divide_pools`` (the division).

Owns: the rows of the plan, and which combinations of draft options are possible.
Does not know: the command line, devices.
Read next: ``state_bytes.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyradix.config import GPU_PREFILL, Settings, context_limit, divide_pools
from hyradix.device_bytes import BesidePools, StepSize, beside_pools
from hyradix.engine.demo import DEMO, demo_directory
from hyradix.errors import ConfigError, ModelLoadError
from hyradix.models.config import CacheConfig, RawConfig
from hyradix.models.forward_shape import forward_shape
from hyradix.models.registry import find_family, reading
from hyradix.models.shapes import expected_shapes
from hyradix.spec_config import DraftShape, draft_shape, log_rows, refused
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
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(DraftShape):
    """A shape of drafts, and ``--decode-log`` (R)."""

    decode_log: int

    def shape(self, num_requests: int) -> SpecShape:
        """For ``state_bytes``."""
        return self.spec_shape(num_requests, self.decode_log)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What decides how much of a GPU is left for pools and logs."""

    memory_fraction: float = _DEFAULTS.memory_fraction
    max_prefill_tokens: int = GPU_PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned for. ``drafts`` None: plain serving, with a log of ``decode_log`` rows."""

    budget: int
    num_requests: int
    drafts: DraftOptions | None = None
    decode_log: int = 0
    max_context: int | None = None
    tokens_per_state: int = _DEFAULTS.tokens_per_state
    gpu: GpuOptions | None = None
    """The budget is a GPU's memory, for everything; None: that of pools and buffers alone."""


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
    window_bytes: int
    """Of the conv windows in it; the rest is recurrent state."""
    max_context: int
    rows: tuple[PlanRow, ...]
    beside: BesidePools | None = None
    """What a GPU holds beside pools and buffers."""

    def as_json(self) -> dict[str, dict[str, Any]]:
        """What ``--json`` writes."""
        slots = {
            "recurrent_bytes": self.state_bytes - self.window_bytes,
            "conv_bytes": self.window_bytes,
            "kv_bytes": self.kv_bytes,
        }
        return {"slots": slots, "modes": {row.mode: row.as_json() for row in self.rows}}


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

    Raises ``ConfigError`` for a combination that cannot be, with the nearest one that can.
    """
    shape = draft_shape(topk, steps, nodes)
    if shape is None:
        return None
    return DraftOptions(
        topk=shape.topk,
        steps=shape.steps,
        nodes=shape.nodes,
        decode_log=log_rows(decode_log, shape),
    )


def make_plan(raw: RawConfig, options: PlanOptions, *, dtype: str = "auto") -> Plan:
    """The plan. Raises ``ModelLoadError`` (unknown architecture) or ``ConfigError``."""
    _check(options)
    with reading("config.json"):
        model = find_family(raw).parse_cache(raw)
        dtype = pick_dtype(raw, dtype)
    shape = model.recurrent_shape(ELEMENT_BYTES[dtype])
    kv_bytes = model.kv_bytes_per_slot(ELEMENT_BYTES[dtype])
    max_context = context_limit(options.max_context, model.max_position)
    modes = MODES if options.drafts is not None else (PLAIN,)
    beside = None
    if options.gpu is not None:
        beside = _beside(raw, options, options.gpu, ELEMENT_BYTES[dtype], max_context)
        usable = int(options.budget * options.gpu.memory_fraction)
        options = replace(options, budget=max(usable - beside.total, 0))
    return Plan(
        model=model,
        dtype=dtype,
        kv_bytes=kv_bytes,
        state_bytes=shape.slot_bytes,
        window_bytes=shape.window_bytes,
        max_context=max_context,
        rows=tuple(_row(mode, shape, options, kv_bytes, max_context) for mode in modes),
        beside=beside,
    )


def _beside(
    raw: RawConfig, options: PlanOptions, gpu: GpuOptions, element_bytes: int, max_context: int
) -> BesidePools:
    """The engine's own sums. Raises ``ModelLoadError`` for a model that cannot be run."""
    with reading("config.json"):
        family = find_family(raw)
        model = family.parse_config(raw, {})
    num_weights = sum(math.prod(shape) for shape in expected_shapes(model, family).values())
    step = StepSize(
        max_requests=options.num_requests,
        max_tokens=gpu.max_prefill_tokens + options.num_requests,
        max_context=max_context,
        table_width=max_context + (options.drafts.nodes if options.drafts is not None else 0),
    )
    return beside_pools(
        forward_shape(model),
        model.recurrent_shape(element_bytes),
        step,
        weight_bytes=num_weights * element_bytes,
        element_bytes=element_bytes,
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
            raise refused(name, value, "it must be positive", 1)
    if options.decode_log < 0:
        raise refused("decode_log", options.decode_log, "it must not be negative", 0)


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

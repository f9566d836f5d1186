"""``hyradix memory``: what fits into a budget, before anything is downloaded or loaded.

Owns: the command's options and its table. Does not know: how bytes are counted.
Read next: ``engine/memory_plan.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hyradix.config import GPU_PREFILL, Settings, check_settings
from hyradix.engine.memory_plan import (
    DraftOptions,
    GpuOptions,
    Plan,
    PlanOptions,
    PlanRow,
    draft_options,
    make_plan,
    read_config,
)
from hyradix.errors import ConfigError
from hyradix.server.options import HELP, parse_size
from hyradix.spec_config import DECODE_LOG

_DEFAULTS = Settings()
_COLUMNS = ("mode", "resident", "peak", "written", "requests", "cached states", "KV tokens")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def memory(
    model: Annotated[
        str, typer.Argument(help="A directory with config.json, a .json file, or 'demo'.")
    ],
    budget: Annotated[
        Any,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Bytes of the pools and buffers, as 512M, 80G; with --device cuda the GPU's.",
        ),
    ],
    requests: Annotated[int, typer.Option(help="Requests that run at the same time.")],
    spec_topk: Annotated[
        int | None, typer.Option(help="Children of a draft node; 1: a chain. (default: 1)")
    ] = None,
    spec_steps: Annotated[
        int | None, typer.Option(help="Depth of the drafts. Without these three: plain serving.")
    ] = None,
    spec_nodes: Annotated[
        int | None, typer.Option(help="Nodes verified, the root included. (default: all drafted)")
    ] = None,
    decode_log: Annotated[
        int | None,
        typer.Option(
            help="Rows of the state log; 0: decode in place. (default: 16 with drafts or on a GPU, "
            "else 0)"
        ),
    ] = None,
    max_context: Annotated[int | None, typer.Option(help=HELP["max_context"])] = None,
    tokens_per_state: Annotated[
        int, typer.Option(help=HELP["tokens_per_state"])
    ] = _DEFAULTS.tokens_per_state,
    dtype: Annotated[
        str,
        typer.Option(help="Of KV and conv windows: auto (the checkpoint's), float32 or bfloat16."),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="cuda: the budget is a GPU's memory, weights and activations included."),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help=HELP["memory_fraction"])
    ] = _DEFAULTS.memory_fraction,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens computed in one step, on a GPU.")
    ] = GPU_PREFILL,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Plan memory from a config.json: bytes, requests, states and tokens of each way to draft."""
    gpu = _gpu(device, memory_fraction, max_prefill_tokens)
    if decode_log is None and gpu is not None:
        decode_log = DECODE_LOG
    options = PlanOptions(
        budget=budget,
        num_requests=requests,
        drafts=draft_options(spec_topk, spec_steps, spec_nodes, decode_log),
        decode_log=decode_log or 0,
        gpu=gpu,
        max_context=max_context,
        tokens_per_state=tokens_per_state,
    )
    plan = make_plan(read_config(model), options, dtype=dtype)
    print("\n".join(table(plan, options)))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(plan.as_json(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {json_path}: {error.strerror}", param="json") from None


def _gpu(device: str | None, memory_fraction: float, max_prefill_tokens: int) -> GpuOptions | None:
    if device in (None, "cpu"):
        return None
    if device != "cuda":
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}", param="device")
    check_settings(Settings(memory_fraction=memory_fraction, max_prefill_tokens=max_prefill_tokens))
    return GpuOptions(memory_fraction=memory_fraction, max_prefill_tokens=max_prefill_tokens)


def table(plan: Plan, options: PlanOptions) -> list[str]:
    """A plan as lines of text."""
    model = plan.model
    lines = [
        f"{model.architecture}, {plan.dtype}: {model.num_recurrent_layers} recurrent and "
        f"{model.num_attention_layers} attention layers",
        f"a state {size(plan.state_bytes)}: {size(plan.state_bytes - plan.window_bytes)} recurrent"
        f" and {plan.window_bytes / 1024:,.1f} KiB of windows; a KV slot {plan.kv_bytes:,} bytes",
        f"budget {size(options.budget)}, {options.num_requests:,} requests, "
        f"context {plan.max_context:,}",
        *_drafts(options.drafts),
        *_beside(plan, options),
        "",
    ]
    cells = [_COLUMNS, *(_cells(row) for row in plan.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        lines.append("  ".join(padded).rstrip())
    lines += [
        f"{row.mode}: {options.num_requests:,} requests do not fit"
        for row in plan.rows
        if not row.is_fitting
    ]
    return lines


def _drafts(drafts: DraftOptions | None) -> list[str]:
    if drafts is None:
        return []
    kind = "chain" if drafts.is_chain else f"tree of topk {drafts.topk}"
    line = f"drafts: {kind}, {drafts.steps} steps, {drafts.nodes} nodes with the root; "
    lines = [f"{line}a log of {drafts.decode_log} rows"]
    if drafts.nodes > drafts.beam_nodes:
        lines.append(f"note: such a beam fills at most {drafts.beam_nodes} of the nodes")
    return lines


def _beside(plan: Plan, options: PlanOptions) -> list[str]:
    """What a GPU holds beside the pools."""
    if plan.beside is None or options.gpu is None:
        return []
    beside, usable = plan.beside, int(options.budget * options.gpu.memory_fraction)
    return [
        f"GPU: {size(beside.weights)} of weights and {size(beside.total - beside.weights)} to "
        f"compute; {size(max(usable - beside.total, 0))} of {size(usable)} are left for pools"
    ]


def _cells(row: PlanRow) -> tuple[str, ...]:
    sizes = (row.resident_bytes, row.peak_bytes, row.written_bytes)
    counts = (row.num_states, row.num_kv_slots) if row.is_fitting else ()
    shown = [f"{count:,}" for count in counts] or ["-", "-"]
    return (row.mode, *map(size, sizes), f"{row.max_requests:,}", *shown)


def size(num_bytes: int) -> str:
    """Bytes for people: ``97.2 GiB``."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{num_bytes} bytes"
    return f"{num_bytes / (1 << 10 * power):,.1f} {_UNITS[power]}"
